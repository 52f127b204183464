"""Compute what the models say about each token of a rollout: log-probabilities, values, exact KL.

A batch of responses is read in one forward pass. No gradient is recorded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ppo_core.algorithm.temperature import tempered
from ppo_core.algorithm.top_k_top_p import truncated
from ppo_core.data.batching import scoring_batches
from ppo_core.data.types import Rollout, TokenRows
from ppo_core.io.progress_bar import each_pass
from ppo_core.models.critic import Critic
from ppo_core.models.policy import LanguageModel


def response_logprobs(
    model: LanguageModel, rollout: Rollout, batch_size: int, *, equal_passes: bool = False
) -> Tensor:
    """Return a model's log-probabilities (B, T) of the responses; 0 outside response_mask.

    For `equal_passes` see `Engine.requires_equal_passes`.
    """
    return _by_token(
        lambda rows: model(rows, rollout.temperature)[0], rollout, batch_size, equal_passes
    )


def truncated_logprobs(
    model: LanguageModel,
    rollout: Rollout,
    batch_size: int,
    *,
    top_k: int,
    top_p: float,
    equal_passes: bool = False,
) -> Tensor:
    """Return log-probabilities (B, T) of the responses under a model restricted to top_k and top_p.

    For a token that top_k or top_p excludes, return the log-probability under the full model. For
    `equal_passes` see `Engine.requires_equal_passes`.
    """

    def logprobs(rows: TokenRows) -> Tensor:
        logits = tempered(model.logits(model.backbone.states(rows)), rollout.temperature)
        kept = truncated(logits, top_k=top_k, top_p=top_p)
        own, cut = (
            each.log_softmax(dim=1).gather(1, rows.targets[:, None])[:, 0]
            for each in (logits, kept)
        )
        return torch.where(cut.isfinite(), cut, own)

    return _by_token(logprobs, rollout, batch_size, equal_passes)


def critic_values(
    critic: Critic, rollout: Rollout, batch_size: int, *, equal_passes: bool = False
) -> Tensor:
    """Return values (B, T) of the states before each response token; 0 outside response_mask.

    For `equal_passes` see `Engine.requires_equal_passes`.
    """
    return _by_token(critic, rollout, batch_size, equal_passes)


def exact_kl(
    policy: LanguageModel,
    reference: LanguageModel,
    rollout: Rollout,
    batch_size: int,
    *,
    equal_passes: bool = False,
) -> Tensor:
    """Return the exact KL(policy || reference) (B, T) at each token; 0 outside response_mask.

    For `equal_passes` see `Engine.requires_equal_passes`.
    """

    def divergences(rows: TokenRows) -> Tensor:
        return policy.full_kl(policy.backbone.states(rows), reference, rows, rollout.temperature)

    return _by_token(divergences, rollout, batch_size, equal_passes)


@torch.no_grad()
def _by_token(
    compute: Callable[[TokenRows], Tensor], rollout: Rollout, batch_size: int, equal_passes: bool
) -> Tensor:
    """Return (B, T): the results (N,) of `compute` for tokens of responses, and 0 elsewhere."""
    found = torch.zeros_like(rollout.logprobs)
    batches = scoring_batches(rollout.row_lengths, batch_size, equal_passes=equal_passes)
    for batch in each_pass(batches, "scoring"):
        mask = rollout.response_mask[batch]
        counted = compute(rollout.token_rows(batch))
        found[batch] = torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, counted)
    return found
