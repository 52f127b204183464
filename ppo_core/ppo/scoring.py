"""Compute reference log-probabilities, values and reward scores of a rollout."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ppo_core.algorithm.logits import tempered
from ppo_core.algorithm.top_k_top_p import truncated
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.batching import scoring_batches
from ppo_core.data.prompts import Prompt
from ppo_core.data.reward_columns import NO_COLUMNS, Columns
from ppo_core.data.types import Rollout, Scores
from ppo_core.distributed.engine import Engine
from ppo_core.io.progress_bar import each_pass
from ppo_core.models.actor_critic import Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.model_bundle import ModelBundle, reward_holders


def score(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    models: ModelBundle,
    module: nn.Module,
    engine: Engine,
    config: PPOConfig,
    columns: Columns = NO_COLUMNS,
) -> Scores:
    """Return the outputs of rewards, reference and critic for a rollout.

    The scores are neither scaled nor clipped. `module` is the prepared module with policy and
    critic. `columns` are the columns of the prompts' rows. Sharded models are gathered only while
    they are used.
    """
    size, equal_passes = config.local_rollout_forward_batch_size, engine.requires_equal_passes()
    divergences = None
    with engine.autocast():
        with engine.all_gathered(reward_holders(models.rewards, module)):
            scores, parts = models.rewards(prompts, rollout, columns)
        # The reference of a policy with an adapter uses the policy's base model.
        with engine.gathered(module if models.shares_weights else models.reference):
            ref_logprobs = response_logprobs(
                models.reference, rollout, size, equal_passes=equal_passes
            )
        values = None
        if models.critic is not None:
            with engine.gathered(module):
                values = critic_values(models.critic, rollout, size, equal_passes=equal_passes)
        if config.kl_estimator == "full":
            with engine.all_gathered([module, models.reference]):
                divergences = exact_kl(
                    models.policy, models.reference, rollout, size, equal_passes=equal_passes
                )
    return Scores(
        scores=scores, parts=parts, ref_logprobs=ref_logprobs, values=values, full_kl=divergences
    )


@torch.no_grad()
def response_logprobs(
    model: LanguageModel, rollout: Rollout, batch_size: int, *, equal_passes: bool = False
) -> Tensor:
    """Return a model's log-probabilities (B, T) of the responses; 0 outside response_mask.

    For `equal_passes` see `Engine.requires_equal_passes`.
    """
    logprobs = torch.zeros_like(rollout.logprobs)
    batches = scoring_batches(rollout.row_lengths, batch_size, equal_passes=equal_passes)
    for batch in each_pass(batches, "scoring"):
        counted, _ = model(rollout.token_rows(batch), rollout.temperature)
        logprobs[batch] = _scattered(counted, rollout.response_mask[batch])
    return logprobs


@torch.no_grad()
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
    logprobs = torch.zeros_like(rollout.logprobs)
    batches = scoring_batches(rollout.row_lengths, batch_size, equal_passes=equal_passes)
    for batch in each_pass(batches, "scoring"):
        rows = rollout.token_rows(batch)
        logits = tempered(model.logits(model.backbone.states(rows)), rollout.temperature)
        kept = truncated(logits, top_k=top_k, top_p=top_p)
        own, cut = (
            each.log_softmax(dim=1).gather(1, rows.targets[:, None])[:, 0]
            for each in (logits, kept)
        )
        counted = torch.where(cut.isfinite(), cut, own)
        logprobs[batch] = _scattered(counted, rollout.response_mask[batch])
    return logprobs


@torch.no_grad()
def critic_values(
    critic: Critic, rollout: Rollout, batch_size: int, *, equal_passes: bool = False
) -> Tensor:
    """Return values (B, T) of the states before each response token; 0 outside response_mask.

    For `equal_passes` see `Engine.requires_equal_passes`.
    """
    values = torch.zeros_like(rollout.logprobs)
    batches = scoring_batches(rollout.row_lengths, batch_size, equal_passes=equal_passes)
    for batch in each_pass(batches, "scoring"):
        counted = critic(rollout.token_rows(batch))
        values[batch] = _scattered(counted, rollout.response_mask[batch])
    return values


@torch.no_grad()
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
    divergences = torch.zeros_like(rollout.logprobs)
    batches = scoring_batches(rollout.row_lengths, batch_size, equal_passes=equal_passes)
    for batch in each_pass(batches, "scoring"):
        rows = rollout.token_rows(batch)
        states = policy.backbone.states(rows)
        counted = policy.full_kl(states, reference, rows, rollout.temperature)
        divergences[batch] = _scattered(counted, rollout.response_mask[batch])
    return divergences


def _scattered(counted: Tensor, mask: Tensor) -> Tensor:
    """Return a (B, T) tensor with the values of `counted` (N,) where `mask` is True, else 0."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, counted)
