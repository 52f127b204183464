"""Which library multiplies fp32 matrices on the CPU, and that what it makes is fp32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ppo_core.models.kernels import matmul_backend
from ppo_core.models.kernels.matmul_backend import are_by_onednn, products_with, small_products

MANY = matmul_backend.LEAST_NUMBERS

pytestmark = pytest.mark.usefixtures("onednn_tried_anew")


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
    monkeypatch.setattr(matmul_backend, "MOST_ERROR", most_error)
    with products_with(numbers):
        assert are_by_onednn() == by_onednn
        with small_products():
            assert not are_by_onednn()
        assert are_by_onednn() == by_onednn


def test_the_trial_is_in_fp32_also_where_passes_are_in_half_precision():
    outside = matmul_backend._onednn_is_exact()
    matmul_backend._onednn_is_exact.cache_clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul_backend._onednn_is_exact() == outside


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
