"""Reports as the pipeline makes them, of made-up scores and a judge that is a rule."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from pipeline.evaluation.compare_in_both_orders import contests_between
from pipeline.evaluation.contests import Contestants, evaluate
from pipeline.evaluation.notes import notes_on
from pipeline.evaluation.sequential.sequential_test import StoppingRule
from pipeline.inputs.human_labels_to_pairs import Vote
from pipeline.inputs.labeled_pairs import LabeledPair
from pipeline.judges.function_judge import FunctionJudge
from pipeline.judges.judge_budget import Spent
from pipeline.registry.decisions import Decision
from pipeline.results.evaluation import (
    AnnotatorTest,
    Baseline,
    Baselines,
    ContestResult,
    Evaluation,
    GuardResult,
    PairedDifference,
    SequentialTest,
    TestedAnnotator,
    TrainedJudge,
    WinRate,
)
from pipeline.results.report_files import EVALUATION_FILE, REWARD_REPORT_FILE, write_report
from pipeline.results.reward_report import (
    Contract,
    Difference,
    EndOfText,
    OnPolicy,
    Probe,
    Probes,
    Rate,
    RewardReport,
    Samples,
    Vocabulary,
)
from pipeline.results.run_cost import JudgeCost, RunCost, StepCost, TokenCounts
from pipeline.results.step_records import Change, EvaluatedPolicy, ValidatedReward
from pipeline.results.summary import Summary, Timings
from pipeline.reward_validation.accuracy import measure_accuracy
from pipeline.reward_validation.calibration import calibrate
from pipeline.reward_validation.lengths import measure_lengths
from pipeline.reward_validation.samples import duplicates, measure_samples
from pipeline.settings.evaluation_config import EvaluationConfig

Record = TypeVar("Record")

RULE = StoppingRule(least=0.5, gain=0.55, alpha=0.001)
"""The rule of the default settings."""

HOSTILE = (
    "<script>document.title='fell'</script>"
    "<img src=x onerror=\"document.title='fell'\">"
    "[link](javascript:document.title='fell') ![pixel](http://192.0.2.1/pixel)"
)
"""What a model or a data set may write, and a browser must not run or fetch."""


def reward_report(*, quoted: str = "", margins: bool = True) -> RewardReport:
    """A report on a reward model that is fit; `quoted` stands wherever it quotes anybody."""
    rng = np.random.default_rng(0)
    pairs = [
        LabeledPair(
            prompt="",
            chosen="a" * int(rng.integers(20, 200)),
            rejected="b" * int(rng.integers(20, 200)),
            margin=float(rng.uniform(0, 5)) if margins else None,
            category=("stories " + quoted) if number % 3 else "reviews",
            tie=number % 20 == 0,
            votes=3,
            agreement=1.0 if number % 2 else 2 / 3,
        )
        for number in range(600)
    ]
    chosen = rng.normal(0.4 + 0.1 * np.array([pair.margin or 2.5 for pair in pairs]), 1)
    rejected = rng.normal(0, 1, 600)
    samples = [["c" * int(rng.integers(20, 200)) for _ in range(8)] for _ in range(64)]
    sample_scores = rng.normal(0, 1, (64, 8))
    scores = measure_samples(sample_scores, rng.normal(1, 1, 64), seed=0)
    return RewardReport(
        fit=True,
        reasons=[],
        training={"loss": 0.6, "steps": 4},
        accuracy=measure_accuracy(chosen, rejected, pairs),
        calibration=calibrate(chosen - rejected),
        lengths=measure_lengths(chosen, rejected, pairs, sample_scores, samples),
        samples=Samples(**vars(scores), duplicates=duplicates(samples)),
        contract=_contract(),
        probes=_probes(),
        on_policy=OnPolicy(
            judge=f"rule {quoted}".strip(),
            prompts=16,
            per_prompt=8,
            pairs=64,
            ties=5,
            invalid=1,
            accuracy=Rate(accuracy=0.759, low=0.635, high=0.85, n=58),
            best_of={"2": 0.624, "4": 0.716},
            low=0.557,
            high=0.829,
            least=0.5,
            spent={},
        ),
        bias=0.4213,
        gain=1.0,
    )


def changed(record: Record, changes: Mapping[str, Any]) -> Record:
    """The record with other values; `accuracy.n` names the field n of the record `accuracy`."""
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        if isinstance(record, dict):
            record = {**record, first: changed(record[first], {rest: value}) if rest else value}
        else:
            inner = changed(getattr(record, first), {rest: value}) if rest else value
            record = replace(record, **{first: inner})
    return record


def _contract() -> Contract:
    return Contract(
        deviation=1.05,
        batch=Difference(largest=2.4e-7, share=2.3e-7),
        right_filler=Difference(largest=0.0, share=0.0),
        left_filler=None,
        odd_scores={"empty": -0.31, "emoji": 0.12, "long": None},
        end_of_text=EndOfText(
            as_set=False,
            difference=0.2,
            accuracy=0.702,
            other_accuracy=0.691,
            gain_low=-0.03,
            gain_high=0.01,
            n=600,
        ),
        vocabulary=Vocabulary(
            largest_id=2047, embeddings=2048, unknown=0.0012, digest="3f" * 32, chat_template=None
        ),
        reasons=[],
    )


def _probes() -> Probes:
    repeated = Probe(preferred=0.31, low=0.28, high=0.34, gain=-0.62, n=1000, gating=True)
    flattery = Probe(preferred=0.955, low=0.94, high=0.966, gain=1.4, n=1000, gating=False)
    return Probes(probes={"repeated words": repeated, "flattery": flattery}, left_out=7, reasons=[])


def win_rate(**changes: Any) -> ContestResult:
    """The result of a contest that a single judge decided, without lengths."""
    result = ContestResult(
        rate=0.6,
        low=0.51,
        high=0.7,
        n=200,
        wins=110,
        losses=70,
        ties=20,
        invalid=0,
        flip_rate=0.1,
        conclusive=True,
        reasons=[],
        judge="rule",
        length_controlled=None,
        equal_length_pairs=0,
        by_length_ratio=[],
        agreement=None,
        test=SequentialTest(
            least=0.5, alpha=0.001, evidence=2000.0, decided="better", asked=200, available=1024
        ),
    )
    return replace(result, **changes)


def evaluation_result(
    *,
    judge: str = "python:judge.py:judge",
    champion: int | None = None,
    trained_judge: TrainedJudge | None = None,
    references: bool = True,
) -> Evaluation:
    """The result of an evaluation in which PPO's answers have more points than all others.

    They are compared with those of a champion too, where its version is given.
    """
    rng = np.random.default_rng(0)
    prompts = [f"prompt {number}" for number in range(200)]
    means = {**({"reference": 0.5} if references else {}), "sft": 0.0, "ppo": 1.0}
    if champion is not None:
        means["champion"] = 0.4
    texts = {
        who: [
            f"{points:.2f}" + "." * int(rng.integers(0, 40)) for points in rng.normal(mean, 1, 200)
        ]
        for who, mean in means.items()
    }
    opponents = ["sft" if champion is None else "champion", *["reference"] * references]
    contests = evaluate(
        FunctionJudge(judge, _most_points, version="1"),
        Contestants(prompts, texts),
        contests_between(means),
        rules={("ppo", opponent): RULE for opponent in opponents},
        people=[
            Vote(prompt="", first="2", second=str(points), label=label)
            for points, label in enumerate(["first", "first", "first", "second", "tie"])
        ],
        config=EvaluationConfig(),
        seed=0,
    )
    assert contests.result.people
    people = replace(contests.result.people, alternative=annotator_test(judge))
    return Evaluation(
        **vars(replace(contests.result, people=people)),
        notes=notes_on(
            trained_judge,
            contests.result.canaries,
            is_reward_model_given=False,
            has_references=references,
        ),
        trained_judge=trained_judge,
        champion=champion,
        improvement=contests.improvement(),
        kl={"sft": 0.0, "ppo": 12.3},
        spent={"openai:gpt": Spent(calls=40, tokens=20_000)},
        distinct=dict.fromkeys(means, 1.0) | {"ppo": 0.985},
        length=dict.fromkeys(means, 31.0) | {"ppo": 40.5},
        repetition=dict.fromkeys(means, 0.012) | {"ppo": 0.034},
        guards={"stops": guard_result(), "polite": guard_result(source="python:guards.py:polite")},
        baselines=Baselines(
            found={
                "greedy": baseline(0.583, 6.25, gain=0.125, low=0.01, high=0.24, judge=judge),
                "best_of_4": baseline(0.771, 0.636, gain=-0.06, low=-0.2, high=0.08, judge=judge),
            },
            ppo=plain_rate(rate=0.708, low=0.6, high=0.8, judge=judge),
            note="",
        ),
    )


def plain_rate(**changes: Any) -> WinRate:
    """A win rate that decides nothing, without lengths."""
    contest = win_rate(**changes, test=None)
    return WinRate(**{field.name: getattr(contest, field.name) for field in fields(WinRate)})


def baseline(
    rate: float, kl: float, *, gain: float, low: float, high: float, judge: str
) -> Baseline:
    """What SFT reaches without PPO, on 200 pairs."""
    return Baseline(
        win_rate=plain_rate(rate=rate, low=rate - 0.1, high=rate + 0.1, judge=judge),
        kl=kl,
        gain=PairedDifference(difference=gain, low=low, high=high, n=200, judge=judge),
        why="",
    )


def annotator_test(quoted: str) -> AnnotatorTest:
    """A judge that can replace two of three people, of whom one has a name with `quoted`."""
    ada = TestedAnnotator(n=40, judge=0.9, person=0.75, p=0.0062, replaceable=True)
    eve = replace(ada, person=1.0, p=0.279, replaceable=False)
    people = {f"ada {quoted}": ada, "bob": ada, "eve": eve}
    return AnnotatorTest(people=people, cost=0.15, winning_rate=2 / 3, passed=True, why="")


def guard_result(**changes: Any) -> GuardResult:
    """The result of a built-in guard that passes."""
    result = GuardResult(
        policy=0.99,
        rival=0.98,
        difference=0.01,
        low=-0.02,
        high=0.04,
        n=200,
        margin=0.05,
        passed=True,
        source="built-in",
    )
    return replace(result, **changes)


def validated(report: RewardReport, folder: Path) -> ValidatedReward:
    """What the flow hands on of a report on a reward model."""
    file = folder / REWARD_REPORT_FILE
    write_report(file, report)
    names = ("fit", "accepted_by_hand", "reasons", "bias", "gain")
    given = {name: getattr(report, name) for name in names}
    return ValidatedReward(**given, report_file=str(file))


def evaluated(report: Evaluation, folder: Path) -> EvaluatedPolicy:
    """What the flow hands on of an evaluation's result."""
    write_report(folder / EVALUATION_FILE, report)
    return EvaluatedPolicy(champion=report.champion, kl=report.kl["ppo"], folder=str(folder))


def decision(action: Literal["promoted", "refused"] = "promoted", **changes: Any) -> Decision:
    """The decision on version 3."""
    made = Decision(
        number=3,
        action=action,
        version=3,
        champion={"promoted": 3, "refused": 2}[action],
        reasons=("It wins.",),
        by="run RLHF/3",
        at="2026-01-01T00:00:00+00:00",
        key="run RLHF/3",
    )
    return replace(made, **changes)


def run_cost(**changes: Any) -> RunCost:
    """The cost of a run of two steps, one of them on two GPUs."""
    loaded = StepCost(
        attempts=1, seconds=60.0, gpus=0, gpu_seconds=0.0, cpu_seconds=90.0, price=0.0
    )
    trained = StepCost(
        attempts=2, seconds=1800.0, gpus=2, gpu_seconds=3600.0, cpu_seconds=1800.0, price=6.88
    )
    cost = RunCost(
        steps={"load_policy": loaded, "train_policy": trained},
        gpu_hours=1.0,
        tokens=TokenCounts(sampled=10_000, trained=40_000),
        judges={"openai:gpt": JudgeCost(calls=40, tokens=20_000, price=0.02)},
        price=6.9,
    )
    return replace(cost, **changes)


def summary(evaluation: Evaluation | None = None, **changes: Any) -> Summary:
    """The summary of a run whose policy beat the champion, version 2."""
    metrics = ("objective/scores", "objective/rlhf_reward", "objective/kl", "objective/entropy")
    made = Summary(
        **vars(evaluation or evaluation_result(champion=2)),
        samples="samples.jsonl",
        judgements="judgements.jsonl",
        reward_model=reward_report(),
        objective={name: Change(first=0.0, last=1.5) for name in metrics},
        warnings=[],
        timings=Timings(
            seconds={"start": 1.0, "train_policy": 60.0},
            episodes_per_second=80.0,
            peak_rss_bytes=2**30,
        ),
        model={"name": "rlhf-policy", "version": "3", "uri": "models:/rlhf-policy/3"},
        promotion=decision(),
        settings={},
        cost=run_cost(),
    )
    return replace(made, **changes)


def _most_points(prompts: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    return ["tie" if a == b else "first" if _points(a) > _points(b) else "second" for a, b in pairs]


def _points(text: str) -> float:
    try:
        return float(text.rstrip("."))
    except ValueError:  # a canary
        return -100.0
