"""Label pairs of the policy's own samples, for the training of the reward model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pipeline.evaluation.compare_in_both_orders import compare
from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.human_labels_to_pairs import pairs_of_votes, unlabeled_rows
from pipeline.inputs.json_lines import write_jsonl
from pipeline.inputs.labeled_pairs import label_pairs
from pipeline.inputs.run_data import PAIRS_FILE, RunData
from pipeline.judges.judge_budget import Budget, Payment, spent_by
from pipeline.judges.make_judge import make_judge_of_run
from pipeline.judges.verdict import Judge, JudgedPrompt
from pipeline.launch.answers import answer_as_ppo, inputs_of_samples
from pipeline.results.step_records import FreshPairs, PreparedModel
from pipeline.settings.fresh_pairs_config import LEAST_PAIRS, PEOPLE
from pipeline.settings.settings import Settings
from pipeline.storage.cached_results import MadeModel, as_values, make_or_reuse
from pipeline.storage.workspace import original_names
from pipeline.tracking.tracker import Tracker
from ppo_core.data.rows.read_rows import Rows
from ppo_core.data.rows.row_columns import Row
from ppo_core.errors import DataError
from ppo_core.io.folder_cache import digest_of, digest_of_code
from ppo_core.io.validation import read_record

LABELLER = "fresh_pairs.labeller"
"""Name of the setting `labeller` in error messages."""

FRESH_PAIRS = "fresh-pairs"
"""Name of the pairs, and first part of the name of their folder in the cache."""

TO_LABEL = "to-label.jsonl"
"""File of pairs that people label."""


@dataclass(frozen=True, kw_only=True)
class LabelCounts:
    """Numbers of pairs in a folder of labeled pairs. Fields that are None are not stored."""

    asked: int
    """All pairs."""

    pairs: int
    """Pairs with a preference."""

    ties: int

    flips: int | None = None
    """Pairs on which a judge chose the same position in both orders; None if people labeled."""

    invalid: int | None = None
    """Pairs without a verdict of a judge; None if people labeled."""

    payment: Payment | None = None

    def __str__(self) -> str:
        """Return a text with the numbers."""
        counts = {"ties": self.ties, "flips": self.flips, "invalid": self.invalid}
        words = [f"{number} {name}" for name, number in counts.items() if number]
        return ", ".join([f"{self.pairs} of {self.asked} pairs have a preference", *words])


class SampledPairs(NamedTuple):
    """Two samples of the policy for each of N prompts."""

    prompts: list[JudgedPrompt]
    firsts: list[str]
    seconds: list[str]

    def different(self) -> "SampledPairs":
        """Return the pairs whose two texts differ."""
        rows = [row for row in zip(*self, strict=True) if row[1] != row[2]]
        return (
            SampledPairs(*map(list, zip(*rows, strict=True))) if rows else SampledPairs([], [], [])
        )


def label_samples(tracker: Tracker, data: RunData, sft: PreparedModel, run: FlowRun) -> FreshPairs:
    """Return labeled pairs of samples of the policy from which PPO starts, see `FreshPairsConfig`.

    Pairs are labeled once for equal inputs, so a resumed or repeated run asks no labeler again.

    Raises:
        ConfigError: the labeler cannot be used.
        DataError: there are too few prompts or too few pairs with a preference; or people have to
            label the pairs first, in the file that the message names.
        JudgeError: the labeler does not answer, or its budget is spent.
    """
    settings = data.settings
    config, budget = settings.fresh_pairs, _budget(settings, run)
    votes = data.fresh_labels()
    if votes is not None:
        code = digest_of_code(
            __name__, "pipeline.inputs.human_labels_to_pairs", "pipeline.inputs.labeled_pairs"
        )
        inputs: dict[str, Any] = {"labels": votes.digest, "code": code}
        made = make_or_reuse(
            run.workspace, FRESH_PAIRS, inputs, lambda folder: as_values(_keep_votes(votes, folder))
        )
    elif config.labeller == PEOPLE:
        _ask_people(tracker, sample_pairs(data, sft.path, run.folder), run)
    else:
        labeller = make_judge_of_run(settings, config.judge, budget, setting=LABELLER)
        made = make_or_reuse(
            run.workspace,
            FRESH_PAIRS,
            _inputs(data, sft, labeller),
            lambda folder: _paid(
                _ask(labeller, sample_pairs(data, sft.path, run.folder), folder), run, budget
            ),
        )
    return _log_labels(tracker, made, run)[0]


def label_round(
    tracker: Tracker,
    data: RunData,
    policy: PreparedModel,
    first: FreshPairs,
    run: FlowRun,
    *,
    number: int,
    pause: Callable[[], None],
) -> tuple[FreshPairs, bool]:
    """Return labeled pairs of samples of the current policy, for a round after the first.

    Also return whether the pairs with a preference are enough for a training. They may be too few,
    because the samples of a policy become more similar during PPO.

    Args:
        tracker: tracker of the step.
        data: data sets of the run.
        policy: the policy that `pause` saves. Its digest covers everything that determines the
            policy, so pairs that are already labeled are found before the policy exists.
        first: pairs of the first round; the digest in their folder's name covers the labeler.
        run: the run of the flow.
        number: number of the round, counted from 1.
        pause: function that trains the policy up to this round and saves it; called only if the
            pairs are not labeled yet, before any model of the labeler is loaded.

    Raises:
        JudgeError: the labeler does not answer, or its budget is spent.
    """
    settings, budget = data.settings, _budget(data.settings, run, number)
    inputs = {
        "policy": policy.digest,
        "first": Path(first.path).name,
        "prompts": digest_of(data.fresh_prompts(number)),
        "code": digest_of_code(__name__),
    }

    def make(folder: Path) -> dict[str, Any]:
        pause()
        pairs = sample_pairs(data, policy.path, run.folder, number)
        labeller = make_judge_of_run(settings, settings.fresh_pairs.judge, budget, setting=LABELLER)
        return _paid(_ask(labeller, pairs, folder, least=0), run, budget)

    made = make_or_reuse(run.workspace, FRESH_PAIRS, inputs, make)
    labeled, counts = _log_labels(tracker, made, run, number)
    return labeled, counts.pairs >= LEAST_PAIRS


def _budget(settings: Settings, run: FlowRun, number: int = 1) -> Budget:
    """Return the budget of the labeler in a round; the limits are of each round."""
    return Budget.of(settings.judging, run.folder / f"{FRESH_PAIRS}-{number}-calls.jsonl")


def _paid(counts: LabelCounts, run: FlowRun, budget: Budget) -> dict[str, Any]:
    payment = Payment(run=run.id, spent=budget.spent({}))
    return as_values(replace(counts, payment=payment))


def _log_labels(
    tracker: Tracker, made: MadeModel, run: FlowRun, number: int | None = None
) -> tuple[FreshPairs, LabelCounts]:
    """Log the counts of labeled pairs, per round if `number` is given; return pairs and counts."""
    counts = read_record(made.values, LabelCounts)
    numbers = {
        f"fresh_pairs/{name}": float(value)
        for name, value in vars(counts).items()
        if isinstance(value, int)
    }
    if number is None:
        tracker.parent.log_figures(numbers)
    else:
        tracker.parent.log_metrics(numbers, step=number)
    print(f"{FRESH_PAIRS}: {counts}", flush=True)
    return FreshPairs(path=made.place, spent=spent_by(run.id, counts.payment)), counts


def sample_pairs(data: RunData, policy: str, folder: Path, number: int = 1) -> SampledPairs:
    """Sample two answers to each prompt of a round, see `answer_as_ppo` and `fresh_prompts`."""
    settings, asked = data.settings, data.fresh_prompts(number)
    texts = answer_as_ppo(settings, policy, folder, [prompt for prompt in asked for _ in range(2)])
    return SampledPairs(asked, texts[::2], texts[1::2])


def _inputs(data: RunData, sft: PreparedModel, labeller: Judge) -> dict[str, Any]:
    """Return everything that determines the pairs and their labels."""
    settings = data.settings
    return {
        "samples": inputs_of_samples(settings, sft.digest),
        "prompts": digest_of(data.fresh_prompts()),
        "count": settings.fresh_pairs.count,
        "labeller": [labeller.name, labeller.version],
        "code": digest_of_code(__name__),
    }


def _ask(
    labeller: Judge, pairs: SampledPairs, folder: Path, *, least: int = LEAST_PAIRS
) -> LabelCounts:
    """Let a labeler compare the pairs in both orders, and write the pairs with a preference.

    `least` is the minimum number of pairs with a preference. A pair of equal texts counts as a
    tie; the labeler is not asked about it.
    """
    different = pairs.different()
    judged = compare(labeller, *different) if different.prompts else None
    outcomes = judged.outcomes if judged else ()
    rows = [
        _preference(prompt, first, second, outcome)
        for prompt, first, second, outcome in zip(*different, outcomes, strict=True)
        if outcome in ("first", "second")
    ]
    invalid = outcomes.count("invalid")
    _write(folder, rows, len(pairs.prompts), least)
    return LabelCounts(
        asked=len(pairs.prompts),
        pairs=len(rows),
        ties=len(pairs.prompts) - len(rows) - invalid,
        flips=sum(judged.flipped) if judged else 0,
        invalid=invalid,
    )


def _keep_votes(votes: Rows, folder: Path) -> LabelCounts:
    """Write the pairs in which most people prefer one answer."""
    pairs = label_pairs(pairs_of_votes(votes))
    rows = [
        _preference(pair.prompt, pair.chosen, pair.rejected, "first")
        for pair in pairs
        if not pair.tie
    ]
    _write(folder, rows, len(pairs), LEAST_PAIRS)
    return LabelCounts(asked=len(pairs), pairs=len(rows), ties=len(pairs) - len(rows))


def _preference(prompt: JudgedPrompt, first: str, second: str, winner: str) -> Row:
    chosen, rejected = (first, second) if winner == "first" else (second, first)
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _write(folder: Path, rows: list[Row], asked: int, least: int) -> None:
    if len(rows) < least:
        raise DataError(
            f"Only {len(rows)} of {asked} pairs of the policy's samples have a preference, and a "
            f"reward model needs at least {least}. Label more pairs, or choose a labeller "
            "that can compare answers to your prompts."
        )
    write_jsonl(folder / PAIRS_FILE, rows, is_masked=False)


def _ask_people(tracker: Tracker, pairs: SampledPairs, run: FlowRun) -> NoReturn:
    """Write the pairs to a file for people to label, and raise a DataError with the next steps."""
    file = run.folder / TO_LABEL
    write_jsonl(file, unlabeled_rows(zip(*pairs, strict=True)))
    tracker.step.log_artifact(file)
    raise DataError(
        f"People have to label {len(pairs.prompts)} pairs of the policy's samples before the "
        f"reward model is trained. {original_names(str(file))} has them, and so has the MLflow "
        f"run, as {TO_LABEL}. Label them on a page with `python flows/feedback.py label FILE`, or "
        "set `label` of each row to first, second or tie; rows without a label are left out. Then "
        "start again with `--set fresh_pairs.labels=FILE`: the fine-tuned policy is reused."
    )
