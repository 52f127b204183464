"""Everything that is measured on a reward model before PPO, and the verdict."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from pipeline.inputs.preference_pairs import LabelledPair, label_pairs
from pipeline.inputs.rows import Rows
from pipeline.reward_validation.accuracy import measure_accuracy
from pipeline.reward_validation.calibration import calibrate
from pipeline.reward_validation.contract import check_contract
from pipeline.reward_validation.gate import reasons_against
from pipeline.reward_validation.lengths import measure_lengths
from pipeline.reward_validation.probes import run_probes
from pipeline.reward_validation.rates import Array
from pipeline.reward_validation.samples import duplicates, measure_samples
from pipeline.reward_validation.scores import require_finite, score_pairs
from pipeline.settings.reward_validation_config import RewardGateConfig
from ppo_core.models.reward_model import RewardModel


class Draw(Protocol):
    """Samples of the policy that PPO starts from."""

    def __call__(self, prompts: Sequence[str], *, samples_per_prompt: int) -> list[list[str]]:
        """So many samples (M, K) of each of M prompts."""
        ...


MAX_REFERENCES = 1000
"""Most references that the bias is the mean of, unless samples are drawn for more prompts."""

MAX_PROBED = 256
"""Most references that probes change; each is scored ten times."""


def validate(
    model: RewardModel,
    pairs: Rows,
    prompts: Rows,
    draw: Draw,
    limits: RewardGateConfig,
    *,
    seed: int,
) -> dict[str, Any]:
    """The report on a reward model, as JSON holds it, and whether it is `fit`.

    Args:
        model: the reward model, as it scores without bias or gain.
        pairs: preferences that it was not trained on.
        prompts: what PPO will train on; their references, if there are any, else the chosen
            responses of `pairs`, are what probes degrade.
        draw: samples of the policy that PPO starts from.
        limits: when it is not fit.
        seed: of intervals and probes.

    Raises:
        ModelError: a score is not finite.
        DataError: a text cannot be read by the model.
    """
    labelled = label_pairs(pairs.usable)
    chosen, rejected = score_pairs(model, labelled)
    decided = np.array([not pair.tie for pair in labelled])
    asked = prompts.column("prompt")[: limits.num_prompts]
    samples = draw(asked, samples_per_prompt=limits.samples_per_prompt)
    sample_scores = _score_samples(model, asked, samples)
    references = _score_references(model, prompts, max(MAX_REFERENCES, limits.num_prompts))

    accuracy = measure_accuracy(chosen, rejected, labelled)
    calibration = calibrate((chosen - rejected)[decided])
    lengths = measure_lengths(chosen, rejected, labelled, sample_scores, samples)
    sampled = measure_samples(
        sample_scores, None if references is None else references[: limits.num_prompts], seed=seed
    )
    contract = check_contract(model, labelled, tolerance=limits.tolerance)
    probes = run_probes(
        model, *_good_answers(prompts, labelled), seed=seed, limit=limits.max_degenerate_preferred
    )
    reasons = [
        *reasons_against(accuracy, calibration, lengths, sampled, limits),
        *contract.reasons,
        *probes.reasons,
    ]
    return {
        "fit": not reasons,
        "reasons": reasons,
        "accuracy": asdict(accuracy),
        "calibration": asdict(calibration),
        "lengths": asdict(lengths),
        "samples": {**asdict(sampled), "duplicates": duplicates(samples)},
        "contract": asdict(contract),
        "probes": asdict(probes),
        "bias": 0.0 if references is None else float(references.mean()),
        "gain": 1 / sampled.deviation if limits.unit_deviation and sampled.deviation else 1.0,
    }


def _score_references(model: RewardModel, prompts: Rows, most: int) -> Array | None:
    """Scores of the first references; None if the prompts have none.

    Raises:
        ModelError: a score is not finite.
    """
    if not prompts.has("reference"):
        print(f"{prompts.source} has no column reference: the reward keeps its own zero.")
        return None
    texts, references = prompts.column("prompt")[:most], prompts.column("reference")[:most]
    scores: Array = model.score_texts(texts, references).double().numpy()
    require_finite(scores, "references")
    return scores


def _good_answers(prompts: Rows, pairs: Sequence[LabelledPair]) -> tuple[list[str], list[str]]:
    """Prompts and what people wrote to them, or liked: what probes make worse."""
    if prompts.has("reference"):
        texts = prompts.column("prompt"), prompts.column("reference")
    else:
        liked = [pair for pair in pairs if not pair.tie]
        texts = [pair.prompt for pair in liked], [pair.chosen for pair in liked]
    return texts[0][:MAX_PROBED], texts[1][:MAX_PROBED]


def _score_samples(
    model: RewardModel, prompts: Sequence[str], samples: Sequence[Sequence[str]]
) -> Array:
    """Scores (M, K) of K samples of each of M prompts."""
    repeated = [prompt for prompt, group in zip(prompts, samples, strict=True) for _ in group]
    scores = model.score_texts(repeated, [text for group in samples for text in group])
    return scores.double().numpy().reshape(len(samples), -1)
