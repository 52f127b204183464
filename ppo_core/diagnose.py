"""`python -m ppo_core.diagnose RUN`: what is wrong in a training with PPO, and what to change.

RUN is the folder of a training (`output_dir`), a run's folder of the flow, or a `metrics.jsonl`.
"""

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from ppo_core.checkpointing.folders import STATE, newest_checkpoint
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import DataError, PPOError, library_errors
from ppo_core.errors.redacted_output import install_redaction
from ppo_core.io.text_files import read_json_file
from ppo_core.reporting.diagnosis import FEWEST_UPDATES, diagnose
from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from ppo_core.reporting.reward_drop import WINDOW

SETTINGS_FILE = "settings.json"
"""File of the settings in a training's folder; the flow writes it."""


def main(argv: Sequence[str]) -> int:
    """Print what is wrong in a training; return 1 if there is no training."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__)
        return 0 if argv in (["-h"], ["--help"]) else 1
    try:
        print(describe_training(Path(argv[0])))
    except PPOError as error:
        print(f"ppo_core: {error}", file=sys.stderr)
        return 1
    return 0


def describe_training(run: Path) -> str:
    """Return what is wrong in a training, with evidence, advice and source, as text.

    Raises:
        DataError: there are no metrics, or the metrics are not from a training with PPO.
    """
    path = _metrics_file(run)
    updates = read_metrics(path)
    if not updates or "objective/kl" not in updates[0]:
        raise DataError(
            f"'{path}' has no metrics of PPO, so there is nothing to diagnose. Name the folder of "
            "a training with PPO, which has a complete line for each update."
        )
    findings = diagnose(_settings(path.parent), updates)
    lines = [f"{path}: {len(updates)} updates"]
    if len(updates) < FEWEST_UPDATES:
        judged = "No trend was" if len(updates) < WINDOW else "Not every trend was"
        lines.append(f"{judged} judged, because trends need {WINDOW} to {FEWEST_UPDATES} updates.")
    for finding in findings:
        when = "" if finding.update is None else f", from update {finding.update}"
        lines += [
            f"\n{finding.rule.capitalize()}{when}",
            f"  Evidence: {finding.evidence}.",
            f"  What to do: {finding.advice}",
            f"  Source: {finding.source}.",
        ]
    return "\n".join(lines if findings else [*lines, "Nothing was found."])


def _metrics_file(run: Path) -> Path:
    """Return the metrics file that a path names.

    Raises:
        DataError: there is no such file.
    """
    places = [run] if run.is_file() else [run / METRICS_FILE, run / "ppo" / METRICS_FILE]
    for place in places:
        if place.is_file():
            return place
    raise DataError(
        f"There is no {METRICS_FILE} in '{run}'. Pass the output_dir of a training that saved "
        "checkpoints, or the folder of a run of the flow."
    )


def _settings(folder: Path) -> PPOConfig:
    """Return the settings from the training's file, or its newest checkpoint, or the defaults.

    A checkpoint has only the settings that decide the result, without the limits `warn_...`. The
    settings of vLLM stay at their defaults: a checkpoint lacks some of them, and the package that
    they need may not be installed here.

    Raises:
        DataError: the file is damaged.
        ConfigError: a setting is out of range.
    """
    checkpoint, file = newest_checkpoint(folder), folder / SETTINGS_FILE
    if file.is_file():
        values = read_json_file(file, DataError)
    elif checkpoint is not None:
        file = checkpoint / STATE
        values = read_json_file(file, DataError)
    else:
        return PPOConfig()
    known = {field.name for field in fields(PPOConfig) if "vllm" not in field.name}
    advice = (
        f"Correct the file, or copy {METRICS_FILE} to another folder to use the default settings."
    )
    with library_errors(DataError, f"'{file}' has no readable settings", advice):
        values = values["identity"]["settings"] if file.name == STATE else values
        given = {name: values[name] for name in known & values.keys()}
        # Earlier versions accepted and stored a kl_horizon without a kl_target.
        if given.get("kl_target") is None:
            given.pop("kl_horizon", None)
    return PPOConfig(**given)


if __name__ == "__main__":
    install_redaction()
    sys.exit(main(sys.argv[1:]))
