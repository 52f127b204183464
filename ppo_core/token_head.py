"""Log-probabilities of chosen tokens and losses of them, without ever holding all logits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

TokenLoss = Callable[[Tensor, slice], Tensor]
"""Log-probabilities (n,) of the tokens of a slice to their losses (n,), each of its own alone."""


@dataclass(frozen=True, kw_only=True)
class TokenHead:
    """What makes distributions over the next token out of hidden states, a chunk at a time."""

    module: nn.Module
    """Holds the matrix from hidden states to the vocabulary."""

    product: ToLogits
    """Hidden states (n, D) times that matrix: (n, V)."""

    rule: ToLogits
    """What a family does with the product: scales or caps it."""

    temperature: float

    def logits(self, hidden: Tensor) -> Tensor:
        """Tempered logits (n, V) of hidden states (n, D)."""
        return tempered(self.rule(self.product(hidden)), self.temperature)

    def logprobs(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each target, and the entropy of its distribution: (N,), (N,).

        hidden is (N, D), targets (N,) token ids. Gradients flow to hidden and to the head through
        the log-probabilities, by logits that are computed again; the entropy carries none.
        """

        def of_chunk(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.logits(states)
            logprobs = logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(dim=-1)
            return logprobs, _distribution(logits.detach(), chosen).entropies

        parts = [
            checkpoint(of_chunk, hidden[part], targets[part], use_reentrant=False)
            for part in self._chunks(hidden)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def loss(
        self, hidden: Tensor, targets: Tensor, token_loss: TokenLoss
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss of the targets' log-probabilities, these, and entropies: (), (N,), (N,).

        Gradients flow through the loss alone. A loss of each token by itself lets a chunk's
        gradients be computed while its logits exist, so that none are computed twice.
        """
        if any(hasattr(parameter, "ds_id") for parameter in self.module.parameters()):
            # ZeRO-3 holds no whole matrix to differentiate by; its hooks fetch it once more.
            logprobs, entropies = self.logprobs(hidden, targets)
            return token_loss(logprobs, slice(None)).sum(), logprobs.detach(), entropies
        loss: Tensor
        loss, logprobs, entropies = _FusedLoss.apply(  # type: ignore[no-untyped-call]
            hidden, targets, token_loss, self, *self.module.parameters()
        )
        return loss, logprobs, entropies

    def divergence(self, hidden: Tensor, reference: "TokenHead", ref_hidden: Tensor) -> Tensor:
        """KL(policy || reference) (N,) over the whole vocabulary, for states (N, D) of each.

        The gradient flows into the policy alone, by logits that are computed again.
        """

        def of_chunk(states: Tensor, ref_states: Tensor) -> Tensor:
            with torch.no_grad():
                ref_logits = reference.logits(ref_states)
            return full_kl(self.logits(states), ref_logits)

        parts = [
            checkpoint(of_chunk, hidden[part], ref_hidden[part], use_reentrant=False)
            for part in self._chunks(hidden)
        ]
        return torch.cat(parts)

    def _chunks(self, hidden: Tensor) -> Iterator[slice]:
        """Slices of the states, of nearly equal sizes.

        ZeRO-3 fetches the head for each chunk from all processes, so they must all have equally
        many: the most that one needs. In others chunks are smaller then, or empty.
        """
        size = max(1, LOGITS_PER_CHUNK // int(self.module.out_features))  # type: ignore[arg-type]
        number = max(1, -(-len(hidden) // size))
        if any(hasattr(parameter, "ds_id") for parameter in self.module.parameters()):
            most = torch.tensor(number, device=hidden.device)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            number = int(most)
        start = 0
        for part in torch.arange(len(hidden)).tensor_split(number):
            yield slice(start, start + len(part))
            start += len(part)


@dataclass(frozen=True)
class _Distribution:
    """Next-token distributions at n states, and what they say of the chosen tokens."""

    probabilities: Tensor
    """(n, V)."""

    logprobs: Tensor
    """(n,) of the chosen tokens."""

    entropies: Tensor
    """(n,)."""


def _distribution(logits: Tensor, chosen: Tensor) -> _Distribution:
    """With p = softmax(z), k a likeliest token: log of the normaliser = z[k] - log p[k]."""
    probabilities = torch.softmax(logits, dim=-1)
    top, likeliest = logits.max(dim=-1)
    normaliser = top - probabilities.gather(1, likeliest[:, None])[:, 0].log()
    return _Distribution(
        probabilities,
        logits.gather(1, chosen[:, None])[:, 0] - normaliser,
        normaliser - torch.linalg.vecdot(probabilities, logits),
    )


class _FusedLoss(torch.autograd.Function):
    """Each chunk's logits are computed, turned into gradients, and dropped.

    With p = softmax(z) for the tempered logits z, the target a, and the loss l of its
    log-probability:

        log p[a] = z[a] - logsumexp(z)        dl / dz = l'(log p[a]) (onehot(a) - p)
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        token_loss: TokenLoss,
        head: TokenHead,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss, log-probabilities (N,) and entropies (N,)."""
        gradients = _HeadGradients(head, parameters)
        total = torch.zeros((), device=hidden.device)
        logprobs, entropies, of_states = [], [], []
        for part in head._chunks(hidden):
            states, chosen = hidden[part], targets[part]
            product = head.product(states).requires_grad_()
            with torch.enable_grad():
                logits = tempered(head.rule(product), head.temperature)
            at = _distribution(logits.detach(), chosen)
            loss, slopes = _loss_and_slopes(at.logprobs, part, token_loss)
            of_logits = at.probabilities.mul_(-slopes[:, None])
            of_logits.scatter_add_(1, chosen[:, None], slopes[:, None])
            (of_product,) = torch.autograd.grad(logits, product, of_logits)
            of_states.append(gradients.add(states, of_product))
            total = total + loss
            logprobs.append(at.logprobs)
            entropies.append(at.entropies)
        ctx.save_for_backward(torch.cat(of_states), *gradients.of_trained)
        ctx.is_trained = [parameter.requires_grad for parameter in parameters]
        result = total, torch.cat(logprobs), torch.cat(entropies)
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


def _loss_and_slopes(logprobs: Tensor, part: slice, token_loss: TokenLoss) -> tuple[Tensor, Tensor]:
    leaf = logprobs.detach().requires_grad_()
    with torch.enable_grad():
        loss = token_loss(leaf, part).sum()
        (slopes,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), slopes


class _HeadGradients:
    """Gradients of a head's trained parameters, added up over chunks."""

    def __init__(self, head: TokenHead, parameters: tuple[nn.Parameter, ...]) -> None:
        self._head = head
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.of_trained = [torch.zeros_like(parameter) for parameter in self._trained]

    def add(self, states: Tensor, of_product: Tensor) -> Tensor:
        """Add those of a chunk; returns the gradient (n, D) of its states."""
        module = self._head.module
        if type(module) is nn.Linear and module.bias is None:
            return self._add_of_matrix(module.weight, states, of_product)
        leaf = states.detach().requires_grad_()
        with torch.enable_grad():
            product = self._head.product(leaf)
        # Of a head with several adapters, those of the others are not used.
        of_states, *of_trained = torch.autograd.grad(
            product, [leaf, *self._trained], of_product, allow_unused=True
        )
        for total, found in zip(self.of_trained, of_trained, strict=True):
            if found is not None:
                total += found
        return of_states

    def _add_of_matrix(self, weight: Tensor, states: Tensor, of_product: Tensor) -> Tensor:
        """The same by hand, which adds to the large gradient as it multiplies."""
        for total in self.of_trained:
            if total.dtype == of_product.dtype == states.dtype:
                total.addmm_(of_product.T, states)
            else:
                total += of_product.T @ states.to(of_product.dtype)
        return (of_product @ weight.to(of_product.dtype)).to(states.dtype)
