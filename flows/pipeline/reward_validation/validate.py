"""Validate a reward model before PPO: make all measurements and decide whether it is fit."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, TypeAlias

import numpy as np

from pipeline.evaluation.pair_accuracy import Array, groups_of, hits, measure_rate
from pipeline.inputs.labeled_pairs import LabeledPair, label_pairs
from pipeline.inputs.training_prompts import one_row_per_prompt
from pipeline.results.reward_report import Contract, OnPolicy, Rate, RewardReport, Samples
from pipeline.reward_validation.accuracy import measure_accuracy
from pipeline.reward_validation.calibration import calibrate
from pipeline.reward_validation.lengths import measure_lengths
from pipeline.reward_validation.on_policy import ScoredSamples
from pipeline.reward_validation.probes import run_probes
from pipeline.reward_validation.reward_gate import (
    accuracy_too_low,
    reasons_against,
    undecided_people,
)
from pipeline.reward_validation.samples import duplicates, measure_samples
from pipeline.reward_validation.score_invariance import check_contract
from pipeline.reward_validation.scores import TextScorer, require_finite, score_pairs
from pipeline.settings.gate_configs import RewardGateConfig
from pipeline.storage.workspace import original_names
from ppo_core.data.chat_template import Messages
from ppo_core.data.rows.read_rows import Rows


class SampleResponses(Protocol):
    """Function that samples the policy from which PPO starts."""

    def __call__(
        self, prompts: Sequence[str | Messages], *, samples_per_prompt: int, start: int
    ) -> list[list[str]]:
        """Return samples (M, K) for M prompts, with K = `samples_per_prompt`.

        `start` is the number of the first prompt. It selects the random numbers: equal random
        numbers for several blocks of prompts would make the blocks' samples dependent.
        """
        ...


@dataclass(frozen=True)
class Preferences:
    """Pairs that people labeled, and on which the reward model was not trained."""

    given: Rows
    """Held-out preferences of the run."""

    samples: Sequence[LabeledPair] = ()
    """Pairs of answers of policies, such as the policy's samples, without ties."""


Compare: TypeAlias = Callable[[Iterable[ScoredSamples]], OnPolicy | None]

MAX_REFERENCES = 1000
"""Maximum number of references whose mean score is the bias; if `num_prompts` of the gate's
settings is larger, `num_prompts` is the maximum."""

MAX_PROBED = 256
"""Maximum number of references for the probes, which score ten versions of each reference."""


def validate(
    scorer: TextScorer,
    preferences: Preferences,
    prompts: Rows,
    draw: SampleResponses,
    limits: RewardGateConfig,
    *,
    compare: Compare | None,
    training: Mapping[str, float],
    seed: int,
) -> RewardReport:
    """Return the report on a reward model; its field `fit` is the verdict.

    Args:
        scorer: scores texts with the reward model, without bias and gain.
        preferences: held-out preferences.
        prompts: rows of PPO's prompts; only the first row of each prompt is used. The probes change
            the references of these rows; without references, the probes change the chosen responses
            of the held-out pairs.
        draw: function that samples the policy from which PPO starts.
        limits: limits of the gate.
        compare: lets the judge compare scored samples; None if the judge cannot be asked.
        training: metrics of the model's training; empty if the run did not train the model.
        seed: seed of the bootstrap intervals and the probes.

    Raises:
        ModelError: a score is not finite.
        DataError: the model cannot read a text, or the judge gives no verdict.
        JudgeError: the judge does not answer.
    """
    labeled = label_pairs(preferences.given)
    chosen, rejected = score_pairs(scorer, labeled)
    decided = np.array([not pair.tie for pair in labeled])
    # The intervals assume that the rows are independent, which rows of one prompt are not.
    prompts = one_row_per_prompt(prompts)
    blocks = scored_samples(scorer, prompts, draw, limits)
    first = next(blocks)
    references = _score_references(scorer, prompts, max(MAX_REFERENCES, limits.num_prompts))
    on_policy = compare(chain([first], blocks)) if compare else None
    own = None if references is None else references[: limits.num_prompts]
    is_comparable = own is not None and not np.isnan(own).any()
    sampled = measure_samples(first.scores, own if is_comparable else None, seed=seed)
    contract = _contract(scorer, labeled, tolerance=limits.tolerance)
    probes = run_probes(
        scorer, *_good_answers(prompts, labeled), seed=seed, limit=limits.max_degenerate_preferred
    )
    measured = RewardReport(
        fit=True,
        reasons=[],
        warnings=[],
        on_policy=on_policy,
        people=_agreement_with_people(scorer, preferences.samples),
        training=dict(training),
        accuracy=measure_accuracy(chosen, rejected, labeled),
        calibration=calibrate((chosen - rejected)[decided], groups_of(labeled)[decided]),
        lengths=measure_lengths(chosen, rejected, labeled, first.scores, first.texts),
        samples=Samples(**vars(sampled), duplicates=duplicates(first.texts)),
        contract=contract,
        probes=probes,
        bias=0.0 if references is None else float(np.nanmean(references)),
        gain=1 / sampled.deviation if limits.unit_deviation and sampled.deviation else 1.0,
    )
    return _with_verdict(measured, limits)


def _contract(scorer: TextScorer, pairs: Sequence[LabeledPair], *, tolerance: float) -> Contract:
    """Check each member of the reward model; return the first failed check, else the first one."""
    checks = [check_contract(one, pairs, tolerance=tolerance) for one in scorer.of_members()]
    return next((check for check in checks if check.reasons), checks[0])


def _agreement_with_people(scorer: TextScorer, pairs: Sequence[LabeledPair]) -> Rate | None:
    """Return how often the model orders pairs as people do; None without pairs."""
    if not pairs:
        return None
    chosen, rejected = score_pairs(scorer, pairs)
    return measure_rate(hits(chosen - rejected), groups_of(pairs))


def _with_verdict(measured: RewardReport, limits: RewardGateConfig) -> RewardReport:
    """Return the report with the verdict of the gate, its reasons and its warnings."""
    reasons = reasons_against(measured, limits) + measured.contract.reasons
    on_policy, accuracy = measured.on_policy, measured.accuracy
    doubts = [accuracy_too_low(accuracy, limits, measured.training)] if on_policy else []
    doubts.append(undecided_people(measured.people))
    # The policy's samples differ from the texts of the probes. If the model chooses well among the
    # samples, PPO may train against it, and the probes only cause warnings: the promotion gate
    # refuses a policy that has learned to repeat itself.
    is_good = on_policy is not None and on_policy.usefulness == "good"
    (doubts if is_good else reasons).extend(measured.probes.reasons)
    warnings = [doubt for doubt in doubts if doubt]
    return replace(measured, fit=not reasons, reasons=reasons, warnings=warnings)


def _score_references(scorer: TextScorer, prompts: Rows, limit: int) -> Array | None:
    """Return the scores of the first `limit` references; None if none can be scored.

    The score of a reference that the model cannot read is NaN.

    Raises:
        ModelError: a score is not finite.
    """
    source, model = original_names(prompts.source), scorer.model
    if not prompts.has("reference"):
        print(f"{source}: not every row has a reference, so the bias is 0.")
        return None
    texts, references = prompts.column("prompt", limit), prompts.column("reference", limit)
    rows = [model.encode(*each) for each in zip(texts, references, strict=True)]
    read = np.array([model.can_read(row) for row in rows])
    if not read.all():
        print(
            f"{source}: the bias leaves out {(~read).sum()} of {len(rows)} references, which are "
            "too long for the reward model.",
            flush=True,
        )
    scores = np.full(len(rows), np.nan)
    scores[read] = scorer.scores([rows[number] for number in np.flatnonzero(read)])
    require_finite(scores[read], "references")
    return scores if read.any() else None


def _good_answers(
    prompts: Rows, pairs: Sequence[LabeledPair]
) -> tuple[list[str | Messages], list[str]]:
    """Return prompts with their references; without references, with the preferred responses."""
    if prompts.has("reference"):
        return prompts.column("prompt", MAX_PROBED), prompts.column("reference", MAX_PROBED)
    decided = [pair for pair in pairs if not pair.tie][:MAX_PROBED]
    return [pair.prompt for pair in decided], [pair.chosen for pair in decided]


def scored_samples(
    scorer: TextScorer, prompts: Rows, draw: SampleResponses, limits: RewardGateConfig
) -> Iterator[ScoredSamples]:
    """Sample answers and score them, for `num_prompts` prompts at a time.

    No prompt may occur in two rows, see `one_row_per_prompt`.
    """
    asked = prompts.column("prompt", max(limits.num_prompts, limits.max_prompts))
    for start in range(0, len(asked), limits.num_prompts):
        block = asked[start : start + limits.num_prompts]
        samples = draw(block, samples_per_prompt=limits.samples_per_prompt, start=start)
        repeated = [prompt for prompt, group in zip(block, samples, strict=True) for _ in group]
        scores = scorer.score_texts(repeated, [text for group in samples for text in group])
        scores = scores.reshape(len(samples), -1)
        require_finite(scores, "samples")
        yield ScoredSamples(block, samples, scores)
