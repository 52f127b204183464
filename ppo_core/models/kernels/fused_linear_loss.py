"""LM head and loss in one pass, without ever holding the logits of all tokens.

With p = softmax(z) for the tempered logits z = W h / T, the target a, and the loss l of its
log-probability:

    log p[a] = z[a] - logsumexp(z)        dl / dz = l'(log p[a]) (onehot(a) - p)

So a chunk's gradients are computed while its logits exist, where autograd would compute the logits
again in the backward pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ppo_core.models.kernels.hooks import is_hooked
from ppo_core.models.kernels.matmul_backend import large_matmuls

LOGITS_PER_BLOCK = 2**20
"""Logits of a softmax that fit into a processor's cache: 4 MiB in fp32."""

TokenLoss = Callable[[Tensor, slice], Tensor]
"""Log-probabilities (n,) of the tokens in a slice to losses (n,).

The loss of a token must depend on its own log-probability alone.
"""


class LMHead(Protocol):
    """Hidden states to tempered logits, in chunks."""

    @property
    def module(self) -> nn.Module:
        """The module that holds the weights, (V, D) in a linear layer."""

    @property
    def rule(self) -> Callable[[Tensor], Tensor] | None:
        """Function of the logits that a family applies after the linear layer."""

    @property
    def temperature(self) -> float:
        """Divisor of the logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return tempered logits (n, V) of hidden states (n, D)."""

    def chunks(self, hidden: Tensor) -> Iterator[slice]:
        """Yield slices that cover hidden states (N, D)."""


@dataclass(frozen=True)
class Distribution:
    """Next-token distributions at n positions, with figures of the chosen tokens."""

    probabilities: Tensor
    """(n, V)."""

    logprobs: Tensor
    """(n,) of the chosen tokens."""

    entropies: Tensor
    """(n,)."""


def distribution(logits: Tensor, chosen: Tensor) -> Distribution:
    """Return the distributions of tempered logits (n, V) for chosen token ids (n,).

    `logits` are overwritten by the probabilities, in blocks that fit into the cache. logsumexp is
    recovered from the maxima: max p = exp(max z - logsumexp(z)).
    """
    size = max(1, LOGITS_PER_BLOCK // logits.shape[1])
    logprobs, entropies = [], []
    for z, ids in zip(logits.split(size), chosen.split(size), strict=True):
        p = torch.softmax(z, dim=-1)
        logsumexp = z.amax(dim=-1) - p.amax(dim=-1).log()
        logprobs.append(z.gather(1, ids[:, None])[:, 0] - logsumexp)
        entropies.append(logsumexp - torch.linalg.vecdot(z, p))
        z.copy_(p)
    return Distribution(logits, torch.cat(logprobs), torch.cat(entropies))


def fused_linear_loss(
    head: LMHead, hidden: Tensor, targets: Tensor, token_loss: TokenLoss
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed token loss (), log-probabilities (N,) and entropies (N,) of targets.

    hidden is (N, D), targets (N,) token ids. Gradients flow through the loss alone, to hidden
    and to the head's parameters.
    """
    loss: Tensor
    loss, logprobs, entropies = _FusedLinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden, targets, token_loss, head, *head.module.parameters()
    )
    return loss, logprobs, entropies


class _FusedLinearLoss(torch.autograd.Function):
    """Computes the logits of a chunk, their gradients, and frees them before the next chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        token_loss: TokenLoss,
        head: LMHead,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = _PlainLinear if _PlainLinear.fits(head, hidden) else _AnyHead
        work = kind(head, parameters)
        results = [
            work.add_chunk(hidden[part], targets[part], token_loss, part)
            for part in head.chunks(hidden)
        ]
        losses, logprobs, entropies, hidden_grads = zip(*results, strict=True)
        ctx.save_for_backward(torch.cat(hidden_grads), *work.grads)
        ctx.is_trained = [parameter.requires_grad for parameter in parameters]
        outputs = torch.stack(losses).sum(), torch.cat(logprobs), torch.cat(entropies)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # With one process loss_grad is 1: skip the copies.
        is_one = bool(loss_grad == 1)
        hidden_grad, *rest = (saved if is_one else saved * loss_grad for saved in ctx.saved_tensors)
        grads = iter(rest)
        parameter_grads = (next(grads) if trained else None for trained in ctx.is_trained)
        return hidden_grad, None, None, None, *parameter_grads


class _ChunkResult(NamedTuple):
    loss: Tensor
    """Sum over the chunk's tokens, ()."""

    logprobs: Tensor
    """(n,)."""

    entropies: Tensor
    """(n,)."""

    hidden_grad: Tensor
    """(n, D)."""


def _loss_and_slopes(logprobs: Tensor, token_loss: TokenLoss, part: slice) -> tuple[Tensor, Tensor]:
    """Return the summed loss () and its derivatives l' (n,) by the log-probabilities."""
    leaf = logprobs.detach().requires_grad_()
    with torch.enable_grad():
        loss = token_loss(leaf, part).sum()
        (slopes,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slopes


class _PlainLinear:
    """A head of one weight matrix, without bias, hooks or rule, in one precision.

    The gradients are written by hand, so that the only passes over (n, V) are the matmuls, the
    softmax and the entropy:

        dl / dh = l' (W[a] - p W) / T        dl / dW = l' (onehot(a) - p) h / T
    """

    @staticmethod
    def fits(head: LMHead, hidden: Tensor) -> bool:
        module = head.module
        return (
            type(module) is nn.Linear
            and not is_hooked(module)
            and module.bias is None
            and head.rule is None
            and module.weight.dtype == hidden.dtype
            and hidden.dtype.itemsize >= 4
            # A GPU is many times faster in half precision.
            and (hidden.device.type == "cpu" or not torch.is_autocast_enabled(hidden.device.type))
        )

    def __init__(self, head: LMHead, parameters: tuple[nn.Parameter, ...]) -> None:
        (self._weight,) = parameters
        self._temperature = head.temperature
        self.grads = [torch.empty_like(p) for p in parameters if p.requires_grad]
        self._is_first = True
        self._buffer = self._weight.new_empty(0, len(self._weight))

    def add_chunk(
        self, states: Tensor, chosen: Tensor, token_loss: TokenLoss, part: slice
    ) -> _ChunkResult:
        """Add a chunk's gradients to `grads`."""
        in_full_precision = torch.autocast(states.device.type, enabled=False)
        with in_full_precision, large_matmuls(self._weight.numel()):
            return self._add_chunk(states, chosen, token_loss, part)

    def _add_chunk(
        self, states: Tensor, chosen: Tensor, token_loss: TokenLoss, part: slice
    ) -> _ChunkResult:
        weight, logits = self._weight, self._logits_buffer(states)
        torch.mm(states / self._temperature, weight.T, out=logits)
        made = distribution(logits, chosen)
        p = made.probabilities
        loss, slopes = _loss_and_slopes(made.logprobs, token_loss, part)
        slopes = slopes[:, None] / self._temperature
        hidden_grad = slopes * (weight[chosen] - p @ weight)
        for grad in self.grads:
            scaled = slopes * states
            beta = 0 if self._is_first else 1
            grad.addmm_(p.T, scaled, beta=beta, alpha=-1)
            grad.index_add_(0, chosen, scaled)
        self._is_first = False
        return _ChunkResult(loss, made.logprobs, made.entropies, hidden_grad)

    def _logits_buffer(self, states: Tensor) -> Tensor:
        """Return memory (n, V) that all chunks share."""
        if len(states) > len(self._buffer):
            self._buffer = states.new_empty(len(states), len(self._weight))
        return self._buffer[: len(states)]


class _AnyHead:
    """A head with a rule, a bias, an adapter, hooks or half precision, by autograd."""

    def __init__(self, head: LMHead, parameters: tuple[nn.Parameter, ...]) -> None:
        self._head = head
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.grads = [torch.zeros_like(parameter) for parameter in self._trained]

    def add_chunk(
        self, states: Tensor, chosen: Tensor, token_loss: TokenLoss, part: slice
    ) -> _ChunkResult:
        """Add a chunk's gradients to `grads`."""
        leaf = states.detach().requires_grad_()
        with torch.enable_grad():
            logits = self._head.logits(leaf)
        made = distribution(logits.detach().clone(), chosen)
        loss, slopes = _loss_and_slopes(made.logprobs, token_loss, part)
        logits_grad = made.probabilities.mul_(-slopes[:, None])
        logits_grad.scatter_add_(1, chosen[:, None], slopes[:, None])
        # A head with several adapters uses the weights of one.
        hidden_grad, *found = torch.autograd.grad(
            logits, [leaf, *self._trained], logits_grad, allow_unused=True
        )
        for total, grad in zip(self.grads, found, strict=True):
            if grad is not None:
                total += grad
        return _ChunkResult(loss, made.logprobs, made.entropies, hidden_grad)
