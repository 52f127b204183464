"""The statistics of a classic step, by the names that its scripts log and plot."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ppo_core.algorithm.masking import masked_mean
from ppo_core.data.types import Experience, Scores, TokenSums
from ppo_core.errors import DataError
from ppo_core.reporting.metrics import Metrics, explained_variance
from ppo_core.reporting.sample_table import Completions

Stats = dict[str, Any]
"""Numbers by name, and under names that end in "_dist" a number for each response."""


def step_stats(
    experience: Experience,
    scores: Scores,
    kl: Tensor,
    sums: TokenSums,
    *,
    kl_coef: float,
    vf_coef: float,
) -> Stats:
    """What one step saw: means over the counted tokens of the whole batch; kl is (B, T).

    `sums` are those of all processes.
    """
    rollout = experience.rollout
    mask = rollout.response_mask

    def of_tokens(values: Tensor) -> float:
        return masked_mean(values, mask).item()

    def spread_of_tokens(values: Tensor) -> float:
        return of_tokens((values - of_tokens(values)) ** 2)

    response_kl = kl.sum(dim=1)
    query_lengths = rollout.prompt_lengths.float()
    response_lengths = rollout.response_lengths.float()
    mean_kl, kl_tokens = _mean(response_kl), of_tokens(kl)
    tokens = sums.tokens
    of_losses = {
        "ppo/loss/policy": sums.policy_loss / tokens,
        "ppo/loss/value": sums.value_loss / tokens,
        "ppo/loss/total": (sums.policy_loss + vf_coef * sums.value_loss) / tokens,
        "ppo/policy/entropy": sums.entropy / tokens,
        "ppo/policy/approxkl": sums.approxkl / tokens,
        "ppo/policy/policykl": sums.kl_from_old / tokens,
        "ppo/policy/clipfrac": sums.clipped / tokens,
        "ppo/policy/ratio": 1 + sums.ratio_error / tokens,
        "ppo/val/clipfrac": sums.value_clipped / tokens,
    }
    return {
        "objective/kl": mean_kl,
        "objective/kl_dist": response_kl.tolist(),
        "objective/kl_coef": kl_coef,
        "objective/entropy": _mean(-rollout.logprobs.sum(dim=1)),
        "ppo/mean_non_score_reward": -kl_coef * kl_tokens,
        "ppo/mean_scores": _mean(scores.scores),
        "ppo/std_scores": _std(scores.scores),
        **of_losses,
        "ppo/policy/advantages_mean": of_tokens(experience.advantages),
        "ppo/returns/mean": of_tokens(experience.returns),
        "ppo/returns/var": spread_of_tokens(experience.returns),
        "ppo/val/mean": of_tokens(experience.values),
        "ppo/val/var": spread_of_tokens(experience.values),
        "ppo/val/error": of_tokens((experience.values - experience.returns) ** 2),
        "ppo/val/var_explained": explained_variance(experience),
        "tokens/queries_len_mean": _mean(query_lengths),
        "tokens/queries_len_std": _std(query_lengths),
        "tokens/queries_dist": query_lengths.tolist(),
        "tokens/responses_len_mean": _mean(response_lengths),
        "tokens/responses_len_std": _std(response_lengths),
        "tokens/responses_dist": response_lengths.tolist(),
    }


def numbers(stats: Stats) -> Metrics:
    """The statistics that are one number each."""
    return {name: value for name, value in stats.items() if isinstance(value, float)}


def guarded(stats: Stats) -> Metrics:
    """Those that the guards of `ppo_core.reporting.health` watch, by the names that they know."""
    return {
        "objective/kl": stats["objective/kl"],
        "val/ratio": stats["ppo/policy/ratio"],
        "policy/entropy_avg": stats["ppo/policy/entropy"],
    }


def texts_table(
    batch: Mapping[str, Sequence[Any]],
    rewards: Sequence[float],
    columns: Sequence[str],
    gather: Callable[[list[Any]], list[Any]],
) -> Completions | None:
    """The texts of a batch with their rewards, of all processes; None if it has none.

    `gather` joins lists of all processes. `columns` are shown beside query and response.

    Raises:
        DataError: the batch has no such column.
    """
    if "query" not in batch or "response" not in batch:
        return None
    others = [name for name in columns if name not in ("query", "response")]
    if missing := [name for name in others if name not in batch]:
        raise DataError(
            f"The batch has no column {missing[0]!r}, which columns_to_log names; it has "
            f"{', '.join(batch)}."
        )
    return Completions(
        gather(list(batch["query"])),
        gather(list(batch["response"])),
        gather(list(rewards)),
        {name: gather([_plain(value) for value in batch[name]]) for name in others},
    )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _mean(values: Tensor) -> float:
    return values.mean().item()


def _std(values: Tensor) -> float:
    return values.std(correction=0).item()
