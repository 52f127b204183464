"""The fused loss of heads that are more than a weight matrix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from ppo_core.models.kernels.fused_linear_loss import FusedLinearLoss

STATES, VOCABULARY, WIDTH = 6, 11, 4


@dataclass(frozen=True)
class Head:
    """The smallest `LMHead`, in chunks of two states."""

    module: nn.Linear
    rule: Callable[[Tensor], Tensor] | None = None
    temperature: float = 0.7

    def logits(self, hidden: Tensor) -> Tensor:
        output = self.module(hidden)
        return (self.rule(output) if self.rule else output) / self.temperature

    def chunks(self, hidden: Tensor) -> Iterator[slice]:
        for start in range(0, len(hidden), 2):
            yield slice(start, start + 2)


def bound(logits: Tensor) -> Tensor:
    return 2 * torch.tanh(logits / 2)


def double(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
    return 2 * output


def make_head(kind: str) -> Head:
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, VOCABULARY, bias=kind == "bias")
    if kind == "hook":
        module.register_forward_hook(double)
    if kind == "replaced forward":
        forward = module.forward
        module.forward = lambda hidden: 2 * forward(hidden)
    return Head(module, bound if kind == "rule" else None)


def token_loss(logprobs: Tensor, part: slice) -> Tensor:
    weights = torch.arange(1.0, STATES + 1)[part]
    return -weights * logprobs.exp()


@pytest.mark.parametrize("kind", ["plain", "bias", "rule", "hook", "replaced forward"])
def test_loss_and_gradients_equal_those_of_autograd(kind: str):
    head = make_head(kind)
    targets = torch.tensor([3, 0, 10, 3, 7, 1])
    hidden = torch.randn(STATES, WIDTH, generator=torch.Generator().manual_seed(1))

    def gradients(loss: Tensor, states: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(3 * loss, [states, *head.module.parameters()]))

    states = hidden.clone().requires_grad_()
    loss, logprobs, entropies = FusedLinearLoss.apply(
        states, targets, token_loss, head, *head.module.parameters()
    )
    actual = gradients(loss, states)

    states = hidden.clone().requires_grad_()
    everything = head.logits(states).log_softmax(dim=-1)
    chosen = everything.gather(1, targets[:, None])[:, 0]
    expected = token_loss(chosen, slice(None)).sum()
    assert_close(loss, expected)
    assert_close(logprobs, chosen.detach())
    assert_close(entropies, -(everything.exp() * everything).sum(dim=-1).detach())
    assert_close(actual, gradients(expected, states))
