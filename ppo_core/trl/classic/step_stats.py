"""The statistics of a classic step, under the names of TRL 0.11."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ppo_core.algorithm.masking import masked_mean
from ppo_core.data.types import Experience, Scores, TokenSums
from ppo_core.errors import DataError
from ppo_core.reporting.metrics import Metrics, explained_variance, update_metrics
from ppo_core.reporting.sample_table import Completions

Stats = dict[str, Any]
"""Name -> a number, an array (B,) with one number per response, or (B, T) with one per token."""

OF_UPDATE = {
    "ppo/loss/policy": "loss/policy_avg",
    "ppo/loss/value": "loss/value_avg",
    "ppo/policy/entropy": "policy/entropy_avg",
    "ppo/policy/approxkl": "policy/approxkl_avg",
    "ppo/policy/clipfrac": "policy/clipfrac_avg",
    "ppo/policy/ratio": "val/ratio",
    "ppo/val/clipfrac": "val/clipfrac_avg",
}
"""Name in TRL 0.11 -> name in the result of `update_metrics`."""


def step_stats(
    experience: Experience,
    scores: Scores,
    kl: Tensor,
    sums: TokenSums,
    *,
    kl_coef: float,
    vf_coef: float,
) -> Stats:
    """Return the statistics of one step on the batch of all processes.

    Means over tokens use counted tokens only. `kl` is (B, T), and `sums` are totals over all
    processes.
    """
    rollout, values, returns = experience.rollout, experience.values, experience.returns
    assert values is not None
    assert returns is not None
    mask = rollout.response_mask

    def token_mean(values: Tensor) -> float:
        return masked_mean(values, mask).item()

    def token_variance(values: Tensor) -> float:
        return token_mean((values - token_mean(values)) ** 2)

    response_kl = kl.sum(dim=1)
    return {
        "objective/kl": _mean(response_kl),
        "objective/kl_dist": _array(response_kl),
        "objective/logprobs": _array(rollout.logprobs),
        "objective/ref_logprobs": _array(experience.ref_logprobs),
        "objective/kl_coef": kl_coef,
        "objective/entropy": _mean(-rollout.logprobs.sum(dim=1)),
        "ppo/mean_non_score_reward": -kl_coef * token_mean(kl),
        "ppo/mean_scores": _mean(scores.scores),
        "ppo/std_scores": _std(scores.scores),
        **_loss_stats(sums, vf_coef),
        "ppo/policy/advantages": _array(experience.advantages),
        "ppo/policy/advantages_mean": token_mean(experience.advantages),
        "ppo/returns/mean": token_mean(returns),
        "ppo/returns/var": token_variance(returns),
        "ppo/val/mean": token_mean(values),
        "ppo/val/var": token_variance(values),
        "ppo/val/error": token_mean((values - returns) ** 2),
        "ppo/val/var_explained": explained_variance(experience),
        **_length_stats("queries", rollout.prompt_lengths.float()),
        **_length_stats("responses", rollout.response_lengths.float()),
    }


def _loss_stats(sums: TokenSums, vf_coef: float) -> Stats:
    metrics = update_metrics(sums)
    return {
        **{name: metrics[ours] for name, ours in OF_UPDATE.items()},
        "ppo/loss/total": (sums.policy_loss + vf_coef * sums.value_loss) / sums.tokens,
        "ppo/policy/policykl": sums.kl_from_old / sums.tokens,
        "ppo/val/vpred": sums.new_values / sums.tokens,
    }


def _length_stats(kind: str, lengths: Tensor) -> Stats:
    return {
        f"tokens/{kind}_len_mean": _mean(lengths),
        f"tokens/{kind}_len_std": _std(lengths),
        f"tokens/{kind}_dist": _array(lengths),
    }


def numbers(stats: Stats) -> Metrics:
    """Return the statistics that are floats."""
    return {name: value for name, value in stats.items() if isinstance(value, float)}


def texts_table(
    batch: Mapping[str, Sequence[Any]],
    rewards: Sequence[float],
    columns: Sequence[str],
    gather: Callable[[list[Any]], list[Any]],
) -> Completions | None:
    """Return a table of queries, responses and rewards.

    Return None if the batch has no column "query" or no column "response".

    `gather` concatenates the lists of all processes. `columns` names further columns of the table.

    Raises:
        DataError: the batch lacks one of `columns`.
    """
    if "query" not in batch or "response" not in batch:
        return None
    others = [name for name in columns if name not in ("query", "response")]
    if missing := [name for name in others if name not in batch]:
        raise DataError(
            f"The batch has no column {missing[0]!r}, which columns_to_log names. Choose from its "
            f"columns: {', '.join(batch)}."
        )
    return Completions(
        gather(list(batch["query"])),
        gather(list(batch["response"])),
        gather(list(rewards)),
        {name: gather([_plain(value) for value in batch[name]]) for name in others},
    )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _mean(values: Tensor) -> float:
    return values.mean().item()


def _array(values: Tensor) -> np.ndarray[Any, Any]:
    return values.cpu().numpy()


def _std(values: Tensor) -> float:
    return values.std(correction=0).item()
