"""The library of fp32 matmuls on the CPU, and that its results are fp32."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ppo_core.models.kernels import matmul_backend
from ppo_core.models.kernels.matmul_backend import (
    large_matmuls,
    may_round,
    small_matmuls,
    uses_onednn,
)

MANY = matmul_backend.MIN_NUMEL

pytestmark = pytest.mark.usefixtures("onednn_tried_anew")


def test_large_matmuls_are_fp32_and_restore_the_backend():
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(2, 300, 300, generator=generator)
    exact = left.double() @ right.double()
    with large_matmuls(MANY):
        error = (left @ right - exact).abs().max()
    assert error < 1e-4
    assert not uses_onednn()


@pytest.mark.parametrize(
    ("max_error", "numel", "by_onednn"),
    [(1.0, MANY, True), (1.0, MANY - 1, False), (0.0, MANY, False)],
    ids=["large", "small", "oneDNN rounds"],
)
def test_large_matrices_go_to_onednn_where_it_is_exact(max_error, numel, by_onednn, monkeypatch):
    monkeypatch.setattr(matmul_backend, "MAX_ERROR", max_error)
    with large_matmuls(numel):
        assert uses_onednn() == by_onednn
        with small_matmuls():
            assert not uses_onednn()
        assert uses_onednn() == by_onednn


def test_exactness_is_tried_in_fp32_under_autocast():
    outside = matmul_backend._onednn_is_exact()
    matmul_backend._onednn_is_exact.cache_clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert matmul_backend._onednn_is_exact() == outside


@pytest.fixture
def library() -> Iterator[Any]:
    """PyTorch's settings of fp32 matmuls on the CPU, restored afterwards."""
    library = torch.backends.mkldnn.matmul
    before = library.fp32_precision
    yield library
    library.fp32_precision = before


def test_a_chosen_precision_is_kept(library):
    library.fp32_precision = "tf32"
    with large_matmuls(MANY), small_matmuls():
        assert library.fp32_precision == "tf32"


@pytest.mark.parametrize(("precision", "rounds"), [("tf32", True), ("ieee", False)])
def test_rounding_is_what_the_user_has_set(precision, rounds, library):
    library.fp32_precision = precision
    assert may_round(torch.device("cpu")) == rounds


@pytest.mark.parametrize("older", ["highest", "medium"])
def test_a_precision_chosen_by_the_older_name_can_be_read_afterwards(older, library):
    torch.set_float32_matmul_precision(older)
    with large_matmuls(MANY), small_matmuls():
        pass
    assert torch.get_float32_matmul_precision() == older
    torch.set_float32_matmul_precision("highest")
