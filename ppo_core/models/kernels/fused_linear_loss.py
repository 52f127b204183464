"""LM head and loss in one pass; the logits of all tokens are never in memory together.

Let z = W h / T be the tempered logits, p = softmax(z), a the target token, and l its loss, which is
a function of log p[a]:

    log p[a] = z[a] - logsumexp(z)        dl / dz = l'(log p[a]) (onehot(a) - p)

So the gradients of a chunk are computed while the logits of the chunk are in memory. Autograd would
have to compute the logits again in the backward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ppo_core.models.kernels.hooks import is_hooked
from ppo_core.models.kernels.matmul_backend import large_matmuls
from ppo_core.models.kernels.token_distribution import Distribution, distribution

TokenLoss = Callable[[Tensor, slice], Tensor]
"""Function that maps the log-probabilities (n,) of the tokens in a slice to losses (n,).

The loss of a token must depend on its own log-probability alone.
"""


class LMHead(Protocol):
    """A head that maps hidden states to tempered logits, in chunks."""

    @property
    def module(self) -> nn.Module:
        """The module with the weights, (V, D) in a linear layer."""

    @property
    def rule(self) -> Callable[[Tensor], Tensor] | None:
        """Function that a model family applies to the output of the linear layer, or None."""

    @property
    def temperature(self) -> float:
        """Divisor of the logits."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return tempered logits (n, V) of hidden states (n, D)."""

    def chunks(self, hidden: Tensor) -> Iterator[slice]:
        """Yield slices that cover hidden states (N, D)."""


class FusedLinearLoss(torch.autograd.Function):
    """Summed loss of chosen tokens; the logits of only one chunk are in memory at a time.

    `apply(hidden, targets, token_loss, head, *head.module.parameters())`, with hidden states
    (N, D) and token ids (N,), returns the summed token loss (), log-probabilities (N,) and
    entropies (N,). Gradients flow through the loss only, to hidden and to the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        targets: Tensor,
        token_loss: TokenLoss,
        head: LMHead,
        *parameters: nn.Parameter,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the losses and all gradients of the summed loss, chunk by chunk."""
        kind = _PlainLinear if _PlainLinear.fits(head, hidden) else _AnyHead
        work = kind(head, parameters)
        chunks = []
        with work.precision():
            for part in head.chunks(hidden):
                states, chosen = hidden[part], targets[part]
                made = work.distribution(states, chosen)
                leaf = made.logprobs.detach().requires_grad_()
                with torch.enable_grad():
                    loss = token_loss(leaf, part).sum()
                (slopes,) = torch.autograd.grad(loss, leaf)
                hidden_grad = work.add_gradients(states, chosen, made, slopes)
                chunks.append((loss.detach(), made.logprobs, made.entropies, hidden_grad))
        losses, logprobs, entropies, hidden_grads = zip(*chunks, strict=True)
        ctx.save_for_backward(torch.cat(hidden_grads), *work.grads)
        ctx.is_trained = [parameter.requires_grad for parameter in parameters]
        outputs = torch.stack(losses).sum(), torch.cat(logprobs), torch.cat(entropies)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that `forward` computed, times the gradient () of the loss."""
        # With one process, loss_grad is 1, and no scaled copies are needed.
        is_one = bool(loss_grad == 1)
        hidden_grad, *rest = (saved if is_one else saved * loss_grad for saved in ctx.saved_tensors)
        grads = iter(rest)
        parameter_grads = (next(grads) if trained else None for trained in ctx.is_trained)
        return hidden_grad, None, None, None, *parameter_grads


class _PlainLinear:
    """A head of one weight matrix, without bias, hooks or rule, in the hidden states' precision.

    The gradients are written by hand, so that only the matmuls, the softmax and the entropy read
    tensors of shape (n, V):

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
            # Autocast on a GPU computes in half precision, which is many times faster there.
            and (hidden.device.type == "cpu" or not torch.is_autocast_enabled(hidden.device.type))
        )

    def __init__(self, head: LMHead, parameters: tuple[nn.Parameter, ...]) -> None:
        (self._weight,) = parameters
        self._temperature = head.temperature
        self.grads = [torch.empty_like(p) for p in parameters if p.requires_grad]
        self._is_first = True
        self._buffer = self._weight.new_empty(0, len(self._weight))

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Compute in the weights' precision, with the faster matmul backend for their size."""
        device = self._weight.device.type
        with torch.autocast(device, enabled=False), large_matmuls(self._weight.numel()):
            yield

    def distribution(self, states: Tensor, chosen: Tensor) -> Distribution:
        """Return the distributions at the states (n, D) of a chunk."""
        logits = self._logits_buffer(states)
        torch.mm(states / self._temperature, self._weight.T, out=logits)
        return distribution(logits, chosen)

    def add_gradients(
        self, states: Tensor, chosen: Tensor, made: Distribution, slopes: Tensor
    ) -> Tensor:
        """Add a chunk's gradients to `grads`; return the gradient of its states (n, D).

        `slopes` (n,) are the derivatives l' of the losses with respect to the log-probabilities.
        """
        weight, p = self._weight, made.probabilities
        slopes = slopes[:, None] / self._temperature
        hidden_grad = slopes * (weight[chosen] - p @ weight)
        for grad in self.grads:
            scaled = slopes * states
            beta = 0 if self._is_first else 1
            grad.addmm_(p.T, scaled, beta=beta, alpha=-1)
            grad.index_add_(0, chosen, scaled)
        self._is_first = False
        return hidden_grad

    def _logits_buffer(self, states: Tensor) -> Tensor:
        """Return memory (n, V) that all chunks share."""
        if len(states) > len(self._buffer):
            self._buffer = states.new_empty(len(states), len(self._weight))
        return self._buffer[: len(states)]


class _AnyHead:
    """Gradients of any head, computed by autograd.

    The head may have a rule, a bias, an adapter, hooks or half precision.
    """

    def __init__(self, head: LMHead, parameters: tuple[nn.Parameter, ...]) -> None:
        self._head = head
        self._trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.grads = [torch.zeros_like(parameter) for parameter in self._trained]
        self._graphs: list[tuple[Tensor, Tensor]] = []

    def precision(self) -> AbstractContextManager[None]:
        return nullcontext()

    def distribution(self, states: Tensor, chosen: Tensor) -> Distribution:
        """Return the distributions at the states (n, D) of a chunk; keep its autograd graph."""
        leaf = states.detach().requires_grad_()
        with torch.enable_grad():
            logits = self._head.logits(leaf)
        self._graphs.append((leaf, logits))
        return distribution(logits.detach().clone(), chosen)

    def add_gradients(
        self, states: Tensor, chosen: Tensor, made: Distribution, slopes: Tensor
    ) -> Tensor:
        """See `_PlainLinear.add_gradients`."""
        leaf, logits = self._graphs.pop()
        logits_grad = made.probabilities.mul_(-slopes[:, None])
        logits_grad.scatter_add_(1, chosen[:, None], slopes[:, None])
        # A head with several adapters uses the weights of only one adapter.
        hidden_grad, *found = torch.autograd.grad(
            logits, [leaf, *self._trained], logits_grad, allow_unused=True
        )
        for total, grad in zip(self.grads, found, strict=True):
            if grad is not None:
                total += grad
        return hidden_grad
