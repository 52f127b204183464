"""Which library multiplies fp32 matrices on the CPU, and that what it makes is fp32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ppo_core import fp32_products, token_head
from ppo_core.fp32_products import (
    ROWS,
    are_by_onednn,
    filled_up,
    products_with,
    small_products,
)
from ppo_core.models import LanguageModel
from tests.tiny import VOCABULARY, make_policy

MANY = fp32_products.LEAST_NUMBERS


@pytest.fixture(autouse=True)
def _tried_anew() -> Iterator[None]:
    fp32_products._onednn_is_exact.cache_clear()
    yield
    fp32_products._onednn_is_exact.cache_clear()


def test_products_with_a_large_matrix_are_those_of_fp32_and_leave_nothing_behind():
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(2, 300, 300, generator=generator)
    exact = left.double() @ right.double()
    with products_with(MANY):
        error = (left @ right - exact).abs().max()
    assert error < 1e-4
    assert not are_by_onednn()


@pytest.mark.parametrize(
    ("most_error", "numbers", "by_onednn"),
    [(1.0, MANY, True), (1.0, MANY - 1, False), (0.0, MANY, False)],
    ids=["large", "small", "a library that rounds too much"],
)
def test_onednn_is_taken_for_large_matrices_where_it_is_exact(
    most_error, numbers, by_onednn, monkeypatch
):
    monkeypatch.setattr(fp32_products, "MOST_ERROR", most_error)
    with products_with(numbers):
        assert are_by_onednn() == by_onednn
        with small_products():
            assert not are_by_onednn()
        assert are_by_onednn() == by_onednn


@pytest.fixture
def library() -> Iterator[Any]:
    """What PyTorch has been told of fp32 products on the CPU."""
    library = torch.backends.mkldnn.matmul
    before = library.fp32_precision
    yield library
    library.fp32_precision = before


def test_a_precision_that_was_chosen_stays(library):
    library.fp32_precision = "tf32"
    with products_with(MANY), small_products():
        assert library.fp32_precision == "tf32"


@pytest.mark.parametrize("older", ["highest", "medium"])
def test_a_precision_that_was_chosen_by_the_older_name_can_be_asked_for_afterwards(older, library):
    torch.set_float32_matmul_precision(older)
    with products_with(MANY), small_products():
        pass
    assert torch.get_float32_matmul_precision() == older
    torch.set_float32_matmul_precision("highest")


def test_rows_are_filled_up_where_onednn_multiplies(monkeypatch):
    monkeypatch.setattr(fp32_products, "MOST_ERROR", 1.0)  # also on a processor that rounds
    states = torch.ones(ROWS + 1, 3)
    assert filled_up(states) is states
    with products_with(MANY):
        assert filled_up(states).sum(dim=1).tolist() == [3.0] * (ROWS + 1) + [0.0] * (ROWS - 1)
        assert filled_up(states[:ROWS]).shape == (ROWS, 3)


@pytest.mark.parametrize("count", [5, ROWS, 3 * ROWS + 1])
def test_a_filled_up_chunk_has_the_loss_and_the_gradients_of_its_states(count, monkeypatch):
    monkeypatch.setattr(token_head, "ROWS_PER_CHUNK", 2 * ROWS)
    generator = torch.Generator().manual_seed(0)
    model = LanguageModel(make_policy().double())
    targets = torch.randint(VOCABULARY, (count,), generator=generator)
    states = torch.randn(count, 32, generator=generator, dtype=torch.float64)

    def learned() -> list[Tensor]:
        model.zero_grad()
        leaf = states.clone().requires_grad_()
        loss, *said = model.token_head(0.7).loss(leaf, targets, lambda found, _: found**2)
        loss.backward()
        return [loss.detach(), *said, leaf.grad, model.head.weight.grad.clone()]

    plain = learned(), model.logits(states)
    monkeypatch.setattr(fp32_products, "LEAST_NUMBERS", 0)
    monkeypatch.setattr(fp32_products, "MOST_ERROR", 1.0)
    filled = learned(), model.logits(states)
    assert_close(filled, plain, rtol=1e-12, atol=1e-12)
