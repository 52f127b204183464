"""Section with what changed since the run of the champion."""

import tomllib
from collections.abc import Mapping
from typing import Any

from pipeline.inputs.flow_run import SETTINGS_FILE, FlowRun
from pipeline.inputs.lineage import is_origin
from pipeline.registry.aliases import read_version
from pipeline.reports.document import Section
from pipeline.settings.settings import flatten
from pipeline.tracking.mlflow_runs import read_artifact
from pipeline.tracking.run_record import PARENT
from ppo_core.errors import PPOError

TITLE = "What changed since the champion's run?"

PACKAGES_FILE = "packages.txt"

NONE = "(none)"


def differences_section(run: FlowRun, name: str, champion: int | None) -> Section:
    """Return the settings, data and packages in which a run differs from the champion's run.

    Args:
        run: this run.
        name: name of the registered model.
        champion: version with which the policy was compared; None if there was no champion.
    """
    if champion is None:
        return Section(title=TITLE, text=("There was no champion, so nothing is compared.",))
    try:
        before = read_version(name, champion)
        if before.run_id is None:
            return Section(title=TITLE, text=(f"Version {champion} was deleted.",))
        parent = run.tracking[PARENT]
        texts = {
            file: (read_artifact(before.run_id, file), read_artifact(parent, file))
            for file in (SETTINGS_FILE, PACKAGES_FILE)
        }
        rows = [
            *differing("settings", *map(_settings, texts[SETTINGS_FILE])),
            *differing("code and data", _origin(before.tags, run), _origin(run.origin, run)),
            *differing("packages", *map(_packages, texts[PACKAGES_FILE])),
        ]
    # A ValueError is a settings file that is not TOML.
    except (PPOError, ValueError) as error:
        return Section(title=TITLE, text=(f"Not compared with version {champion}: {error}",))
    same = f"Settings, code, data and packages are those of version {champion}."
    return Section(
        title=TITLE,
        text=() if rows else (same,),
        headers=("", "", f"Version {champion}", "This run"),
        rows=tuple(rows),
    )


def differing(
    kind: str, before: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[str, ...]]:
    """Return a row for each name whose value differs: kind, name, and both values."""
    return [
        (kind, name, str(before.get(name, NONE)), str(now.get(name, NONE)))
        for name in sorted({*before, *now})
        if before.get(name, NONE) != now.get(name, NONE)
    ]


def _settings(text: str) -> dict[str, Any]:
    return flatten(tomllib.loads(text))


def _packages(text: str) -> dict[str, str]:
    return dict(line.split("==", 1) for line in text.splitlines() if "==" in line)


def _origin(tags: Mapping[str, str], run: FlowRun) -> dict[str, str]:
    """Return the tags of code, data and given models, but those that other rows explain."""
    # A version also has the digests of models that its run trained.
    left_out = {"settings_digest", "seed", *({"model/reward_model"} - run.origin.keys())}
    return {
        name: value
        for name, value in tags.items()
        if name == "python" or (is_origin(name) and name not in left_out)
    }
