"""Compare the current inputs with the inputs of the champion and of runs that made a decision.

A run makes a decision if it promotes or refuses its policy, or refuses its reward model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.inputs.lineage import FLOW_RUN, is_origin
from pipeline.registry.aliases import CHAMPION, read_aliases, read_version
from pipeline.settings.settings import Settings
from pipeline.stages.given_settings import read_settings
from pipeline.stages.start import find_inputs, trace_run
from pipeline.storage.workspace import REGISTRY
from pipeline.tracking.decided_runs import find_decided_run
from pipeline.tracking.mlflow_client import check_databases, check_registry

SETTINGS = "settings_digest"

MEANINGS = {
    "git_changes": "code",
    "git_commit": "code",
    "judge/judge": "judge",
    "judge/labeller": "labeler",
    "model/base": "policy",
    "model/reward_model": "reward model",
    SETTINGS: "settings",
}
"""Lineage tag -> the name of the input in messages, if the tag itself is not clear."""


@dataclass(frozen=True, kw_only=True)
class NewInputs:
    """The current inputs of a run, and their differences from the inputs of the champion."""

    settings: Settings
    """Settings of the run. They name the inputs as the user did, not the fetched copies."""

    lineage: dict[str, str]
    """Lineage tags of the run, such as the commit and the digests of the inputs and settings."""

    compared: dict[str, str]
    """Lineage tags that are compared with the tags of the champion and of decided runs."""

    new: list[str]
    """What is new, as parts of a sentence; empty if the champion or a decided run had equal
    inputs."""

    seen: str
    """The decision of an earlier run on equal inputs; empty if something is new."""


def find_new_inputs(from_file: Mapping[str, Any], run: str) -> NewInputs:
    """Fetch the inputs that the settings name, and compare them with the inputs of earlier runs.

    Nothing is new if the champion, or any run that made a decision, had equal inputs. Therefore, a
    policy that was refused or withdrawn is not trained again.

    Args:
        from_file: tables of the settings file.
        run: id of the run of the flow Retrain.

    Raises:
        ConfigError: a setting is invalid.
        DataError: a data set cannot be read.
        ModelError: a model cannot be read, or MLflow does not answer.
    """
    given = read_settings(from_file, {}, ())
    check_databases(is_written=True)
    check_registry(given.registered_model)
    tags = trace_run(run, given, find_inputs(given)).tags
    compared = {name: tags[name] for name in tags if _is_compared(name, given)}
    version = read_aliases(given.registered_model).get(CHAMPION)
    champion = {} if version is None else read_version(given.registered_model, version).tags
    changes = _changes(compared, champion)
    seen = find_decided_run(compared) or ""
    if champion and not changes:
        # A version that somebody registered in MLflow does not name its run.
        maker = champion.get(FLOW_RUN, "An unknown run")
        seen = f"{maker} made the champion, version {version}, from equal inputs."
    if seen:
        new = []
    elif not champion:
        new = ["no champion"]
    elif SETTINGS not in champion:
        # Most of these tags are on the version's MLflow run, not on the version.
        new = [f"MLflow no longer has the run with the inputs of the champion, version {version}"]
    else:
        new = [f"{name} changed" for name in changes]
    return NewInputs(settings=given, lineage=tags, compared=compared, new=new, seen=seen)


def _is_compared(tag: str, given: Settings) -> bool:
    """Return whether a change of this lineage tag counts as a new input.

    If the settings' policy is a version of the registered model itself, the policy changes with
    each promotion. This change does not count.
    """
    is_own = given.policy.startswith(tuple(f"{REGISTRY}{given.registered_model}{x}" for x in "@/"))
    return is_origin(tag) and not (tag == "model/base" and is_own)


def _changes(lineage: Mapping[str, str], champion: Mapping[str, str]) -> list[str]:
    """Return the names of the inputs whose tags differ from the champion's tags, each name once."""
    changed = [name for name, value in lineage.items() if champion.get(name) != value]
    return list(dict.fromkeys(MEANINGS.get(name, name) for name in changed))
