"""The model card of a registered version."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.inputs.lineage import DataSet
from pipeline.registry.decisions import Decision
from pipeline.reports.baselines import BASELINE_COLUMNS, baseline_rows, worth_of_ppo
from pipeline.reports.document import (
    GUARD_COLUMNS,
    as_equal_length_rate,
    as_interval,
    as_percent,
    guard_cells,
    guard_title,
)
from pipeline.reports.headline_metrics import evaluation_numbers
from pipeline.reports.terminal import CONTEST_TITLES, cost_in_words
from pipeline.results.evaluation import Evaluation
from pipeline.results.run_cost import RunCost
from pipeline.settings.make_settings import flatten
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.data.rows.row_error import list_reasons
from ppo_core.reporting.escaping import as_line, as_markdown, as_table, as_yaml
from ppo_core.training.model_card import without_folders
from serving.manifest import CARD

SHOWN_SAMPLES = 5
"""Number of prompts whose answers the card shows."""

SHOWN_ENDS = ("rate", "low", "high", "length_controlled")
"""Metrics that the table of win rates shows for a contest: the last parts of their names."""

LIMITS = (
    "The model was compared with other models only on the prompts and by the judge below. The "
    "result does not carry over to other tasks, languages or lengths of prompts.",
    "The model learned to answer so that a reward model gives high scores, and may exploit errors "
    "of this reward model and of the preferences that the reward model was trained on.",
    "Nobody checked whether the answers are true, safe or legal. Do not use the model for "
    "decisions about people, or for medical, legal or financial advice.",
)
"""Limits that the card of every version states."""


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model of the run."""

    name: str
    """Folder, hub id or address of the model, or name of a judge."""

    digest: str
    """Digest of the model, or version of a judge."""


@dataclass(frozen=True, kw_only=True)
class VersionFacts:
    """Facts about a version from which the card is written."""

    name: str
    """Name of the registered model."""

    version: int | None
    """Version number; None if the version is not registered yet."""

    models: dict[str, NamedModel]
    """Models by their role in the run: base, SFT, reward model, policy, further rewards, judge."""

    data: list[DataSet]
    """Data sets that the run read."""

    evaluation: Evaluation
    """Evaluation on which the decision is based."""

    cost: RunCost
    """Cost of the run up to the registration."""

    decoding: dict[str, Any]
    """Default arguments of `generate`."""

    samples: list[dict[str, str]]
    """Rows with the prompt and the answer of each contestant; may be empty."""

    decision: Decision | None
    """Decision on the promotion; None before the decision."""

    settings: dict[str, Any]
    """Settings of the run, as nested tables."""


def version_card(facts: VersionFacts) -> str:
    """Return the card as Markdown with a YAML header; quoted text is escaped."""
    sections = [
        f"---\n{_front_matter(facts)}\n---",
        f"# {as_markdown(_title(facts))}",
        f"{as_line(without_folders(facts.models['base'].name))}, tuned with proximal policy "
        "optimization (PPO, [arXiv:1707.06347](https://arxiv.org/abs/1707.06347)) so that a reward "
        "model scores its answers higher.",
        _section("Promotion", _decision(facts)),
        _section("Win rates", _win_rates(facts)),
        _section("Without PPO", _without_ppo(facts.evaluation)),
        _section("Guards", _guards(facts)),
        _section("How to load it", _loading(facts)),
        _section("What it is not for", _bullets(LIMITS)),
        _section("Models", _models(facts.models)),
        _section("Data", _data(facts.data)),
        _section("Metrics", _pairs("metric", _other_metrics(facts))),
        _section("Cost", _cost(facts.cost)),
        _section("Samples", _samples(facts.samples)),
        _section("Settings", _settings(facts.settings)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def version_description(facts: VersionFacts) -> str:
    """Return the decision, the win rates and how to load the version, as Markdown."""
    parts = (
        _decision(facts),
        _win_rates(facts),
        _loading(facts),
        f"{CARD} among the artifacts of the version is the model card: guards, models, data, cost, "
        "samples and settings.",
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(facts: VersionFacts) -> str:
    base = without_folders(facts.models["base"].name)
    return (
        f"base_model: {as_yaml(base)}\nlibrary_name: transformers\n"
        f"model_name: {as_yaml(_title(facts))}\npipeline_tag: text-generation\n"
        "tags:\n- ppo\n- rlhf"
    )


def _title(facts: VersionFacts) -> str:
    number = facts.version
    return facts.name if number is None else f"{facts.name}, version {number}"


def _decision(facts: VersionFacts) -> str:
    decision = facts.decision
    if decision is None:
        return "Not decided yet."
    head = (
        f"**{as_markdown(decision.action).capitalize()}** by {as_markdown(decision.by)} at "
        f"{as_markdown(decision.at)}."
    )
    later = (
        "The tags of the version have its last decision, and the MLflow experiment promotions of "
        f"{as_markdown(facts.name)} has all decisions."
    )
    return "\n\n".join(part for part in (head, _bullets(decision.reasons), later) if part)


def _loading(facts: VersionFacts) -> str:
    number = "VERSION" if facts.version is None else facts.version
    uri = json.dumps(f"models:/{facts.name}/{number}")
    return (
        "```python\nimport mlflow\n\n"
        f"pipeline = mlflow.transformers.load_model({uri})\n```\n\n"
        "`pipeline(prompt, return_full_text=False)` returns the answer alone; without this "
        "argument, the returned text begins with the prompt. A chat model takes messages as "
        "its prompt.\n\n"
        "For a service, `load_champion` in `flows/champion.py` verifies every file and loads the "
        "model. "
        "By default the model decodes as in its evaluation:\n\n"
        + _pairs("argument", facts.decoding)
    )


def _win_rates(facts: VersionFacts) -> str:
    table = _table(
        ("", "wins", "95 % interval", "at equal length", "pairs", "ties", "judge"),
        (
            (
                CONTEST_TITLES.get(contest, contest),
                as_percent(rate.rate),
                as_interval(rate),
                as_equal_length_rate(rate),
                rate.n,
                rate.ties,
                without_folders(rate.judge),
            )
            for contest, rate in facts.evaluation.win_rate.items()
        ),
    )
    doubts = [f"Inconclusive: {reason}" for reason in facts.evaluation.reasons]
    remarks = _bullets([*facts.evaluation.notes, *doubts])
    return "\n\n".join(part for part in (table, remarks) if part)


def _without_ppo(evaluation: Evaluation) -> str:
    if evaluation.baselines is None:
        return ""
    table = _table(("", *BASELINE_COLUMNS), baseline_rows(evaluation))
    return f"{table}\n\n{_bullets(worth_of_ppo(evaluation.baselines))}"


def _guards(facts: VersionFacts) -> str:
    guards = facts.evaluation.guards
    if not guards:
        return ""
    rows = ((guard_title(name), *guard_cells(guard)) for name, guard in guards.items())
    return _table(("", *GUARD_COLUMNS), rows)


def _models(models: Mapping[str, NamedModel]) -> str:
    rows = ((part, without_folders(one.name), one.digest) for part, one in models.items())
    return _table(("part", "model", "digest"), rows)


def _data(data: Iterable[DataSet]) -> str:
    rows = (
        (
            one.name,
            without_folders(one.source),
            one.rows,
            list_reasons(one.left_out) or "0",
            one.digest,
        )
        for one in data
    )
    return _table(("used as", "data", "rows", "left out", "digest"), rows)


def _other_metrics(facts: VersionFacts) -> Mapping[str, float]:
    """Return the metrics that the tables of win rates and guards do not show."""
    shown = {
        f"win_rate/{contest}/{end}" for contest in facts.evaluation.win_rate for end in SHOWN_ENDS
    } | {f"guards/{name}" for name in facts.evaluation.guards}
    return {
        name: value
        for name, value in evaluation_numbers(facts.evaluation).items()
        if name not in shown
    }


def _cost(cost: RunCost) -> str:
    rows = [
        (name, step.attempts, f"{step.gpu_seconds:.0f}", f"{step.cpu_seconds:.0f}")
        for name, step in cost.steps.items()
    ]
    table = _table(("step", "attempts", "GPU seconds", "CPU seconds"), rows)
    return f"{cost_in_words(cost)}.\n\n{table}"


def _samples(samples: Sequence[Mapping[str, str]]) -> str:
    if not samples:
        return ""
    columns = list(samples[0])
    return _table(
        columns,
        ([shown_prompt(row[name]) for name in columns] for row in samples[:SHOWN_SAMPLES]),
    )


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {as_line(line)}" for line in lines)


def _pairs(what: str, values: Mapping[str, Any]) -> str:
    return _table((what, "value"), values.items()) if values else ""


def _table(headers: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    return as_table(headers, rows, _shown)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:z.4g}" if isinstance(value, float) else str(value)


def _settings(settings: Mapping[str, Any]) -> str:
    """Return the table of settings; paths are shown without folders."""
    shown = {
        name: without_folders(value) if isinstance(value, str) else value
        for name, value in flatten(settings).items()
    }
    return _pairs("setting", shown)
