"""Find the differences between two runs, such as a run and the run of the champion."""

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from pipeline.inputs.flow_run import SETTINGS_FILE, FlowRun
from pipeline.inputs.lineage import is_input
from pipeline.registry.aliases import read_version
from pipeline.reports.document import Section, as_number
from pipeline.settings.make_settings import flatten
from pipeline.tracking.mlflow_runs import read_artifact
from pipeline.tracking.run_list import facts_in_mlflow
from pipeline.tracking.run_record import PARENT
from ppo_core.errors import ConfigError, PPOError

TITLE = "What changed since the champion's run?"

PACKAGES_FILE = "packages.txt"

NONE = "(none)"

RESULTS = re.compile(
    "(win_rate|baseline)/.+/rate|improvement/difference|(kl|distinct|length|repetition|guards)/.+|"
    "reward_model/(accuracy|best_of_4|people)|objective/(scores|rlhf_reward|kl|entropy)|"
    "cost/(gpu_hours|price|judge_calls)"
)
"""Names of the metrics that are shown side by side."""


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
            why = f"Version {champion} was deleted, or was registered without an MLflow run."
            return Section(title=TITLE, text=(why,))
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
    # ValueError: a settings file is not TOML.
    except (PPOError, ValueError) as error:
        return Section(title=TITLE, text=(f"Not compared with version {champion}: {error}",))
    same = f"This run and version {champion} have equal settings, code, data and packages."
    return Section(
        title=TITLE,
        text=() if rows else (same,),
        headers=("", "", f"Version {champion}", "This run"),
        rows=tuple(rows),
    )


def compare_runs(first: str, second: str) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return the differences between two runs, and their results side by side.

    Args:
        first: MLflow id of the first run's parent run.
        second: MLflow id of the second run's parent run.

    Returns:
        The rows of `differing` for settings, code, data and packages; and the results, one row for
        each, with its name and both values.

    Raises:
        ModelError: MLflow does not answer, or does not have the settings of a run.
        ConfigError: the settings of a run are damaged.
    """
    both = (first, second)
    try:
        settings = [_settings(read_artifact(one, SETTINGS_FILE)) for one in both]
    except ValueError as error:
        raise ConfigError(
            f"{SETTINGS_FILE} of one of the runs {first} and {second} in MLflow is not valid TOML: "
            f"{error}. The runs cannot be compared."
        ) from error
    packages = [_packages(read_artifact(one, PACKAGES_FILE)) for one in both]
    (tags, results), (other_tags, other_results) = map(facts_in_mlflow, both)
    rows = [
        *differing("settings", *settings),
        *differing("code and data", _inputs(tags), _inputs(other_tags)),
        *differing("packages", *packages),
    ]
    shown = [
        (name, *(as_number(found.get(name)) for found in (results, other_results)))
        for name in sorted({*results, *other_results})
        if RESULTS.fullmatch(name)
    ]
    return rows, shown


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


def _inputs(tags: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in tags.items() if is_input(name)}


def _origin(tags: Mapping[str, str], run: FlowRun) -> dict[str, str]:
    """Return the tags of code, data and given models, without tags that repeat other rows."""
    # A version of older code also has the digest of a reward model that its run trained.
    left_out = {"settings_digest", "seed", *({"model/reward_model"} - run.origin.keys())}
    return {name: value for name, value in _inputs(tags).items() if name not in left_out}
