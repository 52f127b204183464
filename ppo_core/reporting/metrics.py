"""Metrics of the batch of all processes; means over tokens use counted tokens only."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ppo_core.algorithm.kl import kl_per_token
from ppo_core.algorithm.losses import importance_weights
from ppo_core.algorithm.masking import masked_sum
from ppo_core.algorithm.repetition import most_frequent_share, repeated_share
from ppo_core.data.types import Experience, Rollout, Scores, TokenSums
from ppo_core.reporting.metrics_file import SPREAD

Metrics = dict[str, float]

OF_CRITIC = ("loss/value_avg", "val/clipfrac_avg")
"""Metrics of an update that a run without a critic lacks."""

LARGEST = 1 - 1e-6
"""Bound of a correlation's absolute value, because the Fisher transformation of 1 is infinite."""

SMALLEST_NORM = 1e-9
"""Below this product of norms, at least one of two series is constant up to rounding errors."""


class PhaseTimer:
    """Times the phases of an update: `with timer("sampling")` adds "time/sampling", in seconds."""

    def __init__(self) -> None:
        """Start without measured phases."""
        self._seconds: Metrics = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure the duration of the `with` block."""
        started = time.monotonic()
        yield
        self._seconds[f"time/{phase}"] = time.monotonic() - started

    def pop(self) -> Metrics:
        """Return the durations of the phases since the last call of `pop`."""
        seconds, self._seconds = self._seconds, {}
        return seconds


def objective_metrics(rollout: Rollout, scores: Scores, kl: Tensor, *, kl_coef: float) -> Metrics:
    """Return metrics of a scored batch: mostly means over the responses, such as score and KL.

    `val/num_eos_tokens` is a number of responses. Names that end in `_p10` and `_p90` are quantiles
    over the responses. kl (B, T) must be 0 at tokens that are not counted.
    """
    response_kl = kl.sum(dim=1)
    sums = {
        "objective/kl": response_kl.sum(),
        "objective/entropy": -masked_sum(rollout.logprobs, rollout.response_mask),
        "objective/non_score_reward": -kl_coef * response_kl.sum(),
        "objective/scores": scores.scores.sum(),
        **{f"rewards/{name}": part.sum() for name, part in scores.parts.items()},
        "val/response_length": rollout.response_lengths.sum(),
        "val/repetition": repeated_share(rollout.response_ids, rollout.response_lengths).sum(),
        "val/num_eos_tokens": rollout.has_stop.sum(),
    }
    totals = torch.stack([value.to(kl) for value in sums.values()]).tolist()
    means = {name: total / len(rollout) for name, total in zip(sums, totals, strict=True)}
    means["val/num_eos_tokens"] *= len(rollout)
    means |= spread("objective/scores", scores.scores)
    means |= spread("val/response_length", rollout.response_lengths)
    means["val/repetition_reward"] = repetition_reward(rollout, scores.scores)
    means["objective/kl_coef"] = kl_coef
    means["objective/rlhf_reward"] = means["objective/non_score_reward"] + means["objective/scores"]
    return means


def spread(name: str, values: Tensor) -> Metrics:
    """Return the 10 % and the 90 % quantile of values (B,), between which most responses lie."""
    values = values.double()
    found = values.quantile(values.new_tensor(list(SPREAD.values()))).tolist()
    return {f"{name}_{end}": value for end, value in zip(SPREAD, found, strict=True)}


def repetition_reward(rollout: Rollout, scores: Tensor) -> float:
    """Return how strongly scores (B,) correlate with repetition among responses of equal length.

        r = partial correlation of score and repetition, given the length
        max(0, tanh(atanh(r) - 2.33 / sqrt(D - 4)))

    The result is the lower end of a one-sided 99 % interval (Fisher's transformation with one
    variable held fixed), so that a small batch does not give a large value by chance. D is the
    number of distinct responses. Equal responses count once, with their mean score. If they counted
    separately, the interval would be too narrow for a policy that repeats responses. There are
    three measures of repetition: the fraction of repeated tokens, of repeated 3-grams, and of the
    most frequent token. The largest of the three correlations is used. The result is never below 0,
    and it is 0 for fewer than 8 distinct responses.
    """
    ids, lengths, scores = _distinct_responses(rollout, scores)
    if len(ids) < 8:
        return 0.0
    measures = (
        repeated_share(ids, lengths, n=1),
        repeated_share(ids, lengths, n=3),
        most_frequent_share(ids, lengths),
    )
    score = _without_trend(scores, lengths)
    correlations = [_correlation(score, _without_trend(each, lengths)) for each in measures]
    bounded = min(max(*correlations, -LARGEST), LARGEST)
    return max(0.0, math.tanh(math.atanh(bounded) - 2.33 / math.sqrt(len(ids) - 4)))


def _distinct_responses(rollout: Rollout, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (D, T), lengths (D,) and mean scores (D,) of the distinct responses."""
    groups: dict[tuple[int, ...], list[int]] = {}
    lengths = rollout.response_lengths.tolist()
    for row, ids in enumerate(rollout.response_ids.tolist()):
        groups.setdefault(tuple(ids[: lengths[row]]), []).append(row)
    first, scores = [rows[0] for rows in groups.values()], scores.cpu()
    means = torch.stack([scores[rows].mean() for rows in groups.values()])
    return rollout.response_ids[first], rollout.response_lengths[first], means


def _correlation(first: Tensor, second: Tensor) -> float:
    """Return the correlation of two series whose means are 0; 0 if one of them is constant."""
    norm = (first.norm() * second.norm()).item()
    return 0.0 if norm < SMALLEST_NORM else (first @ second).item() / norm


def _without_trend(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the residuals of a least-squares fit of `values` by a line over `lengths`."""
    values, lengths = values.cpu().double(), lengths.cpu().double()
    values, lengths = values - values.mean(), lengths - lengths.mean()
    variance = lengths @ lengths
    return values - lengths * (values @ lengths) / variance if variance > 0 else values


def sampler_metrics(logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float) -> Metrics:
    """Return metrics of the mismatch between vLLM server and policy, over counted tokens (N,).

    "vllm/kl" is the k3 estimate of KL(server || policy) in nats per token; it is about 0 if server
    and policy have the same model weights. "vllm/weight_mean" is the mean of `importance_weights`.
    "vllm/weight_max" is the largest importance weight before the cap, and "vllm/capped" the
    fraction of importance weights above the cap.
    """
    ratio = torch.exp(logprobs - behavior_logprobs)
    return {
        "vllm/kl": kl_per_token(behavior_logprobs, logprobs, "k3").mean().item(),
        "vllm/weight_mean": importance_weights(logprobs, behavior_logprobs, cap=cap).mean().item(),
        "vllm/weight_max": ratio.max().item(),
        "vllm/capped": (ratio > cap).float().mean().item(),
    }


def explained_variance(experience: Experience) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over counted tokens; 0 if returns are equal.

    The experience must have a critic's values. 1 means a perfect critic, 0 a critic as good as a
    constant, and a negative result a critic worse than a constant.
    """
    assert experience.returns is not None
    assert experience.values is not None
    mask = experience.rollout.response_mask
    returns = experience.returns[mask].double()
    errors = returns - experience.values[mask].double()
    variance = returns.var(correction=0).item()
    return 1 - errors.var(correction=0).item() / variance if variance > 0 else 0.0


def update_metrics(sums: TokenSums, *, has_critic: bool = True) -> Metrics:
    """Return means (and the ratio's variance) over the counted tokens of one update's steps.

    `val/first_ratio_error` is a mean over the first optimizer step only.
    """
    tokens = sums.tokens
    ratio_error = sums.ratio_error / tokens
    means = {
        "policy/approxkl_avg": sums.approxkl / tokens,
        "policy/clipfrac_avg": sums.clipped / tokens,
        "policy/entropy_avg": sums.entropy / tokens,
        "loss/policy_avg": sums.policy_loss / tokens,
        "loss/value_avg": sums.value_loss / tokens,
        "loss/kl_avg": sums.kl_loss / tokens,
        "val/clipfrac_avg": sums.value_clipped / tokens,
        "val/ratio": 1 + ratio_error,
        "val/ratio_var": sums.ratio_error_squared / tokens - ratio_error**2,
        "val/first_ratio_error": sums.first_ratio_error / sums.first_tokens,
    }
    return {name: mean for name, mean in means.items() if has_critic or name not in OF_CRITIC}
