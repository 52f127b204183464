"""Scale, clip and penalize the scores; compute token rewards, advantages and returns."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.advantages import (
    gae_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    returns_to_go,
)
from ppo_core.algorithm.kl import kl_per_token
from ppo_core.algorithm.reward_shaping import (
    clip_scores,
    length_penalty,
    overlong_penalty,
    penalize_missing_stop,
    token_rewards,
)
from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.algorithm.whitening import masked_whiten
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.encode_prompts import prompt_text, response_texts
from ppo_core.data.prompts import Prompt
from ppo_core.data.types import Experience, Rollout, Scores


def shaped_scores(
    scores: Tensor,
    rollout: Rollout,
    config: PPOConfig,
    moments: RunningMoments,
) -> Tensor:
    """Return scores (B,), scaled and clipped, minus penalties for length and a missing stop token.

    With `use_score_scaling`, first update the running moments with the scores.
    """
    if config.use_score_scaling:
        moments.update(scores)
        scores = moments.scale(scores, center=config.use_score_norm)
    if config.score_clip is not None:
        scores = clip_scores(scores, config.score_clip)
    if config.missing_eos_penalty:
        scores = penalize_missing_stop(scores, rollout.has_stop, config.missing_eos_penalty)
    if config.length_penalty:
        scores = length_penalty(scores, rollout.response_lengths, config.length_penalty)
    if config.overlong_buffer:
        scores = scores - overlong_penalty(
            rollout.response_lengths,
            response_length=config.response_length,
            buffer=config.overlong_buffer,
            penalty=config.overlong_penalty,
        )
    return scores


def divergence(rollout: Rollout, scores: Scores, estimator: str) -> Tensor:
    """Return the KL divergence from the reference at each token (B, T), 0 outside response_mask."""
    if scores.full_kl is not None:
        return scores.full_kl
    kl = kl_per_token(rollout.logprobs, scores.ref_logprobs, estimator)
    return torch.where(rollout.response_mask, kl, 0)


def make_experience(
    rollout: Rollout, scores: Scores, kl: Tensor, config: PPOConfig, *, kl_coef: float
) -> Experience:
    """Compute advantages and returns from the scores and the KL divergence `kl` (B, T).

    `kl_coef` is the weight of the KL divergence in the token rewards or, with `kl_in_loss`, in the
    loss.
    """
    whiten = partial(masked_whiten, mask=rollout.response_mask)
    in_reward = 0.0 if config.kl_in_loss else kl_coef
    rewards = token_rewards(scores.scores, kl, rollout.response_mask, kl_coef=in_reward)
    if config.whiten_rewards:
        rewards = whiten(rewards, keep_mean=True)
    returns = None
    if scores.values is not None:
        advantages, returns = _gae_and_returns(rewards, scores.values, rollout, config)
    elif config.compares_samples:
        advantages = _advantages_of_groups(rewards, rollout, config)
    else:
        to_go = partial(returns_to_go, gamma=config.gamma)
        advantages = _without_masked_tokens(to_go, rollout.response_mask, rewards)
    if config.standardizes_advantages:
        advantages = whiten(advantages, keep_mean=False)
    return Experience(
        rollout=rollout,
        values=scores.values,
        ref_logprobs=scores.ref_logprobs,
        kl_loss_coef=kl_coef if config.kl_in_loss else 0.0,
        advantages=advantages,
        returns=returns,
    )


def _gae_and_returns(
    rewards: Tensor, values: Tensor, rollout: Rollout, config: PPOConfig
) -> tuple[Tensor, Tensor]:
    """Return advantages (B, T) relative to the critic's values, and the critic's targets (B, T)."""

    def advantages(gae_lambda: float) -> Tensor:
        gae = partial(gae_advantages, gamma=config.gamma, gae_lambda=gae_lambda)
        return _without_masked_tokens(gae, rollout.response_mask, rewards, values)

    of_policy = advantages(config.lam)
    of_critic = of_policy if config.lam_critic is None else advantages(config.lam_critic)
    return of_policy, of_critic + values


def _advantages_of_groups(rewards: Tensor, rollout: Rollout, config: PPOConfig) -> Tensor:
    """Return advantages (B, T) of responses compared with other responses to the same prompt.

    In a response, all tokens in `response_mask` have the same advantage, and other tokens have 0.
    """
    totals, group = rewards.sum(dim=1), config.samples_per_prompt
    if config.advantage_estimator == "rloo":
        advantages = leave_one_out_advantages(totals, group=group)
    else:
        scales = config.scale_by_group_std
        advantages = group_relative_advantages(totals, group=group, scales=scales)
    return torch.where(rollout.response_mask, advantages[:, None], 0)


def _without_masked_tokens(
    function: Callable[..., Tensor], mask: Tensor, *tensors: Tensor
) -> Tensor:
    """Apply a function of (B, T) tensors as if each row had only the tokens in `mask`.

    Tokens outside the mask, such as a tool's output, are not actions of the policy.
    """
    order = (~mask).long().argsort(dim=1, stable=True)
    together = function(*(tensor.gather(1, order) for tensor in tensors))
    return torch.zeros_like(together).scatter(1, order, together)


def describe_broken(
    scores: Tensor,
    prompts: Sequence[Prompt],
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Return a warning about non-finite scores (B,) that quotes the first affected response."""
    broken = (~scores.isfinite()).nonzero()[:, 0].tolist()
    first = broken[0]
    prompt = prompt_text(tokenizer, prompts[first])
    response = response_texts(tokenizer, rollout)[first]
    return (
        f"{len(broken)} of {len(scores)} scores are not finite. The first of them is "
        f"{scores[first].item()}, for the prompt {prompt!r} with the response {response!r}. "
        "All processes skip this batch, so the policy learns nothing from it. Remove the prompt, "
        "or correct the reward."
    )
