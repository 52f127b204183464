"""Log-probabilities of chosen tokens from hidden states, without ever holding all logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ppo_core.kl import full_kl
from ppo_core.tensors import tempered

LOGITS_PER_CHUNK = 2**22
"""Logits that exist at a time: 16 MiB in fp32."""

ToLogits = Callable[[Tensor], Tensor]


def token_logprobs(
    hidden: Tensor,
    targets: Tensor,
    to_logits: ToLogits,
    head: nn.Module,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of its distribution: (N,), (N,).

    hidden is (N, D), targets (N,) token ids; `to_logits` maps (n, D) to (n, V) with the
    parameters of `head`. Gradients flow to hidden and to the head through the
    log-probabilities; the entropy carries none.
    """
    parameters = tuple(head.parameters())
    chunks = _num_chunks(head, hidden)
    if any(hasattr(parameter, "ds_id") for parameter in parameters):
        # ZeRO-3 holds no whole matrix to differentiate by; its hooks fetch it once more.
        return _checkpointed_logprobs(hidden, targets, to_logits, temperature, chunks)
    logprobs: Tensor
    entropies: Tensor
    logprobs, entropies = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, targets, to_logits, temperature, chunks, *parameters
    )
    return logprobs, entropies


def chunked_kl(
    hidden: Tensor,
    to_logits: ToLogits,
    ref_hidden: Tensor,
    ref_to_logits: ToLogits,
    head: nn.Module,
    temperature: float,
) -> Tensor:
    """KL(policy || reference) (N,) over the whole vocabulary, for hidden states (N, D) of each.

    The logits of a chunk are computed again in the backward pass.
    """

    def of_chunk(states: Tensor, ref_states: Tensor) -> Tensor:
        logits = tempered(to_logits(states), temperature)
        with torch.no_grad():
            ref_logits = tempered(ref_to_logits(ref_states), temperature)
        return full_kl(logits, ref_logits)

    number = _num_chunks(head, hidden)
    chunks = zip(hidden.tensor_split(number), ref_hidden.tensor_split(number), strict=True)
    return torch.cat([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])


def _num_chunks(head: nn.Module, hidden: Tensor) -> int:
    """Into how many chunks the states are cut.

    ZeRO-3 fetches the head for each chunk from all processes, so they must all have equally
    many: the most that one needs. In others chunks are smaller then, or empty.
    """
    size = max(1, LOGITS_PER_CHUNK // int(head.out_features))  # type: ignore[arg-type]
    number = max(1, -(-len(hidden) // size))
    if any(hasattr(parameter, "ds_id") for parameter in head.parameters()):
        most = torch.tensor(number, device=hidden.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        number = int(most)
    return number


def _logprobs_of_chunk(
    states: Tensor, chosen: Tensor, to_logits: ToLogits, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = tempered(to_logits(states), temperature)
    normaliser = logits.logsumexp(dim=-1)
    logprobs = logits.gather(1, chosen[:, None])[:, 0] - normaliser
    with torch.no_grad():
        mean_logit = torch.softmax(logits, dim=-1).mul_(logits).sum(dim=-1)
        return logprobs, normaliser - mean_logit


def _checkpointed_logprobs(
    hidden: Tensor, targets: Tensor, to_logits: ToLogits, temperature: float, number: int
) -> tuple[Tensor, Tensor]:
    of_chunk = partial(_logprobs_of_chunk, to_logits=to_logits, temperature=temperature)
    chunks = zip(hidden.tensor_split(number), targets.tensor_split(number), strict=True)
    parts = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies).detach()


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
        to_logits: ToLogits,
        temperature: float,
        number: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, (N,) each."""
        parts = [
            _logprobs_of_chunk(states, chosen, to_logits, temperature)
            for states, chosen in zip(
                hidden.tensor_split(number), targets.tensor_split(number), strict=True
            )
        ]
        logprobs, entropies = zip(*parts, strict=True)
        ctx.save_for_backward(hidden, targets, *parameters)
        ctx.to_logits, ctx.temperature, ctx.number = to_logits, temperature, number
        ctx.device_type = hidden.device.type
        # The backward pass runs outside of the caller's autocast and must repeat its precision.
        ctx.autocast = torch.is_autocast_enabled(ctx.device_type)
        ctx.autocast_dtype = torch.get_autocast_dtype(ctx.device_type)
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and of the head's parameters, for grad (N,) of log-probabilities."""
        hidden, targets, *parameters = ctx.saved_tensors
        number = ctx.number
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        states_grads, sums = [], [torch.zeros_like(parameter) for parameter in trained]
        for states, chosen, slope in zip(
            hidden.tensor_split(number),
            targets.tensor_split(number),
            grad.tensor_split(number),
            strict=True,
        ):
            leaf = states.detach().requires_grad_()
            precision = torch.autocast(ctx.device_type, ctx.autocast_dtype, enabled=ctx.autocast)
            with torch.enable_grad(), precision:
                logits = tempered(ctx.to_logits(leaf), ctx.temperature)
            slopes = torch.softmax(logits.detach(), dim=-1).mul_(-slope[:, None])
            slopes.scatter_add_(1, chosen[:, None], slope[:, None])
            # Of a head with several adapters, those of the others are not used.
            state_grad, *grads = torch.autograd.grad(
                logits, [leaf, *trained], slopes, allow_unused=True
            )
            states_grads.append(state_grad)
            for total, part in zip(sums, grads, strict=True):
                if part is not None:
                    total += part
        by_parameter = dict(zip(map(id, trained), sums, strict=True))
        head_grads = (by_parameter.get(id(parameter)) for parameter in parameters)
        return torch.cat(states_grads), None, None, None, None, *head_grads
