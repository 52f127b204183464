"""Measure the KL divergence of a policy from a reference on the policy's own answers."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_core.data.batching import scoring_batches
from ppo_core.data.text_config import text_config
from ppo_core.data.types import Rollout
from ppo_core.errors import ModelError
from ppo_core.errors.out_of_memory import BatchSize
from ppo_core.io.progress_bar import each_pass
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.logprobs_and_values import response_logprobs

LoadReference = Callable[[], PreTrainedModel]
"""Function that returns the reference. It is called after the last pass through the policy's
backbone, so that the backbone can leave the memory of the GPU."""


def divergence_of_samples(
    policy: LanguageModel, rollout: Rollout, load_reference: LoadReference, batches: BatchSize
) -> float:
    """Return an unbiased estimate of KL(policy || reference), in nats per response.

        mean over responses of  sum over tokens t of  KL(p[t] || q[t])

    p[t] and q[t] are the next-token distributions of policy and reference, and their divergence is
    exact. So only the choice of the earlier tokens adds noise (Rao-Blackwellized estimator,
    arXiv:2504.10637). With the preset `stories`, the standard error is 0.10 to 0.13 nats for 200
    responses at 7 nats; with the log-ratios of the sampled tokens it would be 0.3.

    The policy's hidden states wait on the CPU for the reference's: N x D numbers for N tokens.

    Args:
        policy: the policy; its LM head is moved to the reference's device.
        rollout: responses that were sampled from the policy's full distribution.
        load_reference: see `LoadReference`.
        batches: number of sequences in a pass.

    Raises:
        ModelError: policy and reference have different numbers of tokens.
    """
    states = batches.run(lambda size: _response_states(policy, rollout, size))
    reference = LanguageModel(load_reference())
    sizes = [text_config(one.model.config).vocab_size for one in (policy, reference)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"The policy has {sizes[0]} tokens and the reference {sizes[1]}, so their KL "
            "divergence is not defined. Use a reference with the policy's vocabulary."
        )
    policy.head.to(reference.device)
    return batches.run(lambda size: _mean_divergence(policy, reference, rollout, states, size))


@torch.no_grad()
def _response_states(policy: LanguageModel, rollout: Rollout, batch_size: int) -> list[Tensor]:
    """Return the policy's hidden states (tokens, D) of each response, on the CPU."""
    found = [torch.empty(0)] * len(rollout)
    for batch in each_pass(_batches(rollout, batch_size), "scoring"):
        states = policy.backbone.states(rollout.token_rows(batch)).cpu()
        lengths = rollout.response_mask[batch].sum(dim=1).tolist()
        for row, part in zip(batch.tolist(), states.split(lengths), strict=True):
            found[row] = part
    return found


@torch.no_grad()
def _mean_divergence(
    policy: LanguageModel,
    reference: LanguageModel,
    rollout: Rollout,
    states: list[Tensor],
    batch_size: int,
) -> float:
    total = 0.0
    for batch in each_pass(_batches(rollout, batch_size), "scoring"):
        rows = rollout.token_rows(batch).to(reference.device)
        own = torch.cat([states[row] for row in batch.tolist()]).to(reference.device)
        total += policy.full_kl(own, reference, rows, rollout.temperature).sum().item()
    return total / len(rollout)


def _batches(rollout: Rollout, batch_size: int) -> list[Tensor]:
    return scoring_batches(rollout.row_lengths, batch_size, equal_passes=False)


def divergence_of_greedy(
    rollout: Rollout, load_reference: LoadReference, temperature: float, batches: BatchSize
) -> float:
    """Return -log p of greedy responses, in nats per response.

    A greedy response has probability 1 under the policy. p is its probability under the reference
    at `temperature`.
    """
    reference, rollout = LanguageModel(load_reference()), replace(rollout, temperature=temperature)
    logprobs = batches.run(lambda size: response_logprobs(reference, rollout, size))
    return -logprobs.sum(dim=1).mean().item()
