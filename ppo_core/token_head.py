"""Log-probabilities of chosen tokens from hidden states, without ever holding all logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ppo_core.tensors import tempered

LOGITS_PER_CHUNK = 2**22
"""Logits that exist at a time: 16 MiB in fp32."""


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    head: nn.Module,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of its distribution: (N,), (N,).

    hidden is (N, D), targets (N,) token ids; `to_logits` maps (n, D) to (n, V) with the
    parameters of `head`. Gradients flow to hidden and to the head through the
    log-probabilities; the entropy carries none.
    """
    parameters = tuple(head.parameters())
    size = max(1, LOGITS_PER_CHUNK // parameters[0].shape[0])
    logprobs: Tensor
    entropies: Tensor
    logprobs, entropies = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, targets, to_logits, temperature, size, *parameters
    )
    return logprobs, entropies


class _ChunkedLogprobs(torch.autograd.Function):
    """The logits of a chunk are computed, used and dropped; the backward pass does it again.

    With p = softmax(z) for the tempered logits z, and a the target:

        log p[a] = z[a] - logsumexp(z)        d log p[a] / dz = onehot(a) - p
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        to_logits: Callable[[Tensor], Tensor],
        temperature: float,
        size: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, (N,) each."""
        logprobs, entropies = [], []
        for states, chosen in zip(hidden.split(size), targets.split(size), strict=True):
            logits = tempered(to_logits(states), temperature)
            normaliser = logits.logsumexp(dim=-1)
            logprobs.append(logits.gather(1, chosen[:, None])[:, 0] - normaliser)
            mean_logit = torch.softmax(logits, dim=-1).mul_(logits).sum(dim=-1)
            entropies.append(normaliser - mean_logit)
        ctx.save_for_backward(hidden, targets, *parameters)
        ctx.to_logits, ctx.temperature, ctx.size = to_logits, temperature, size
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and of the head's parameters, for grad (N,) of log-probabilities."""
        hidden, targets, *parameters = ctx.saved_tensors
        size = ctx.size
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        states_grads, sums = [], [torch.zeros_like(parameter) for parameter in trained]
        for states, chosen, slope in zip(
            hidden.split(size), targets.split(size), grad.split(size), strict=True
        ):
            leaf = states.detach().requires_grad_()
            with torch.enable_grad():
                logits = tempered(ctx.to_logits(leaf), ctx.temperature)
            slopes = torch.softmax(logits.detach(), dim=-1).mul_(-slope[:, None])
            slopes.scatter_add_(1, chosen[:, None], slope[:, None])
            state_grad, *grads = torch.autograd.grad(logits, [leaf, *trained], slopes)
            states_grads.append(state_grad)
            for total, part in zip(sums, grads, strict=True):
                total += part
        by_parameter = dict(zip(map(id, trained), sums, strict=True))
        head_grads = (by_parameter.get(id(parameter)) for parameter in parameters)
        return torch.cat(states_grads), None, None, None, None, *head_grads
