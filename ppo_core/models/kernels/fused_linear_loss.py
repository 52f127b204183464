"""A loss of chosen tokens, whose gradients are computed while the logits of a chunk exist.

With p = softmax(z) for the tempered logits z = W h / T, the target a, and the loss l of its
log-probability:

    log p[a] = z[a] - logsumexp(z)        dl / dz = l'(log p[a]) (onehot(a) - p)

So the logits are computed once, where a backward pass would compute them again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ppo_core.models.kernels.matmul_backend import products_with

if TYPE_CHECKING:
    from ppo_core.models.lm_head import ChunkedLMHead

LOGITS_AT_A_TIME = 2**20
"""Logits that a pass over them takes together: 4 MiB in fp32."""

TokenLoss = Callable[[Tensor, slice], Tensor]
"""Log-probabilities (n,) of the tokens of a slice to their losses (n,), each of its own alone."""


@dataclass(frozen=True)
class Distribution:
    """Next-token distributions at n states, and what they say of the chosen tokens."""

    probabilities: Tensor
    """(n, V)."""

    logprobs: Tensor
    """(n,) of the chosen tokens."""

    entropies: Tensor
    """(n,)."""


def distribution(logits: Tensor, chosen: Tensor) -> Distribution:
    """Of tempered logits (n, V), in whose place the probabilities are written.

    A few rows at a time, so that the logits beside them fit into a processor's cache. The largest
    of both tell the normaliser: max p = exp(max z - log of the normaliser).
    """
    size = max(1, LOGITS_AT_A_TIME // logits.shape[1])
    logprobs, entropies = [], []
    for z, ids in zip(logits.split(size), chosen.split(size), strict=True):
        p = torch.softmax(z, dim=-1)
        normaliser = z.amax(dim=-1) - p.amax(dim=-1).log()
        logprobs.append(z.gather(1, ids[:, None])[:, 0] - normaliser)
        entropies.append(normaliser - torch.linalg.vecdot(z, p))
        z.copy_(p)
    return Distribution(logits, torch.cat(logprobs), torch.cat(entropies))


def fused_loss(
    head: "ChunkedLMHead", hidden: Tensor, targets: Tensor, token_loss: TokenLoss
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss of the targets' log-probabilities, these, and entropies: (), (N,), (N,).

    hidden is (N, D), targets (N,) token ids. Gradients flow through the loss alone, to hidden
    and to the head.
    """
    loss: Tensor
    loss, logprobs, entropies = _FusedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, targets, token_loss, head, *head.module.parameters()
    )
    return loss, logprobs, entropies


class _FusedLoss(torch.autograd.Function):
    """Each chunk's logits are computed, turned into gradients, and dropped."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        token_loss: TokenLoss,
        head: "ChunkedLMHead",
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss, log-probabilities (N,) and entropies (N,)."""
        kind = _PlainMatrix if _PlainMatrix.fits(head, hidden) else _AnyHead
        work = kind(head, parameters)
        of_chunks = [
            work.learn(hidden[part], targets[part], token_loss, part)
            for part in head.chunks(hidden)
        ]
        losses, logprobs, entropies, of_states = zip(*of_chunks, strict=True)
        ctx.save_for_backward(torch.cat(of_states), *work.of_trained)
        ctx.is_trained = [parameter.requires_grad for parameter in parameters]
        result = torch.stack(losses).sum(), torch.cat(logprobs), torch.cat(entropies)
        ctx.mark_non_differentiable(*result[1:])
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of hidden and of the head's parameters, for the slope () of the loss."""
        # With one process it is 1, and the matrix's gradient need not be copied.
        is_one = bool(slope == 1)
        of_states, *rest = (saved if is_one else saved * slope for saved in ctx.saved_tensors)
        of_trained = iter(rest)
        of_head = (next(of_trained) if trained else None for trained in ctx.is_trained)
        return of_states, None, None, None, *of_head


OfChunk = tuple[Tensor, Tensor, Tensor, Tensor]
"""Summed loss (), log-probabilities (n,), entropies (n,) and gradient (n, D) of the states."""


def _loss_and_slopes(logprobs: Tensor, token_loss: TokenLoss, part: slice) -> tuple[Tensor, Tensor]:
    leaf = logprobs.detach().requires_grad_()
    with torch.enable_grad():
        loss = token_loss(leaf, part).sum()
        (slopes,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slopes


class _PlainMatrix:
    """A head that is a matrix and nothing else, in one precision.

    By hand no pass over (n, V) is needed but for the products, the softmax and the entropy:

        dl / dh = l' (W[a] - p W) / T        dl / dW = l' (onehot(a) - p) h / T
    """

    @staticmethod
    def fits(head: "ChunkedLMHead", hidden: Tensor) -> bool:
        """Whether a head is that, for states of this precision."""
        module = head.module
        return (
            type(module) is nn.Linear
            and module.bias is None
            and head.rule is None
            and module.weight.dtype == hidden.dtype
            and hidden.dtype.itemsize >= 4
            # Elsewhere than on a CPU the units for half precision are many times faster.
            and (hidden.device.type == "cpu" or not torch.is_autocast_enabled(hidden.device.type))
        )

    def __init__(self, head: "ChunkedLMHead", parameters: tuple[nn.Parameter, ...]) -> None:
        (self._weight,) = parameters
        self._temperature = head.temperature
        self.of_trained = [torch.empty_like(p) for p in parameters if p.requires_grad]
        self._is_first = True
        self._room = self._weight.new_empty(0, len(self._weight))

    def learn(self, states: Tensor, chosen: Tensor, token_loss: TokenLoss, part: slice) -> OfChunk:
        """The loss of a chunk, whose gradients are added to those of the chunks before."""
        whole = torch.autocast(states.device.type, enabled=False)
        with whole, products_with(self._weight.numel()):
            return self._learn(states, chosen, token_loss, part)

    def _learn(self, states: Tensor, chosen: Tensor, token_loss: TokenLoss, part: slice) -> OfChunk:
        weight, room = self._weight, self._room_for(states)
        torch.mm(states / self._temperature, weight.T, out=room)
        said = distribution(room, chosen)
        loss, slopes = _loss_and_slopes(said.logprobs, token_loss, part)
        slopes = slopes[:, None] / self._temperature
        of_states = slopes * (weight[chosen] - room @ weight)
        for total in self.of_trained:
            pulled = slopes * states
            beta = 0 if self._is_first else 1
            total.addmm_(room.T, pulled, beta=beta, alpha=-1)
            total.index_add_(0, chosen, pulled)
        self._is_first = False
        return loss, said.logprobs, said.entropies, of_states

    def _room_for(self, states: Tensor) -> Tensor:
        """Room for logits, the same for all chunks."""
        if len(states) > len(self._room):
            self._room = states.new_empty(len(states), len(self._weight))
        return self._room[: len(states)]


class _AnyHead:
    """A head of any kind, by autograd: with a rule, a bias, an adapter, in half precision."""

    def __init__(self, head: "ChunkedLMHead", parameters: tuple[nn.Parameter, ...]) -> None:
        self._head = head
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.of_trained = [torch.zeros_like(parameter) for parameter in self._trained]

    def learn(self, states: Tensor, chosen: Tensor, token_loss: TokenLoss, part: slice) -> OfChunk:
        """The loss of a chunk, whose gradients are added to those of the chunks before."""
        leaf = states.detach().requires_grad_()
        with torch.enable_grad():
            logits = self._head.of_product(self._head.product(leaf))
        said = distribution(logits.detach().clone(), chosen)
        loss, slopes = _loss_and_slopes(said.logprobs, token_loss, part)
        of_logits = said.probabilities.mul_(-slopes[:, None])
        of_logits.scatter_add_(1, chosen[:, None], slopes[:, None])
        # Of a head with several adapters, those of the others are not used.
        of_states, *of_trained = torch.autograd.grad(
            logits, [leaf, *self._trained], of_logits, allow_unused=True
        )
        for total, found in zip(self.of_trained, of_trained, strict=True):
            if found is not None:
                total += found
        return loss, said.logprobs, said.entropies, of_states
