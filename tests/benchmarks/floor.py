"""The FLOPs that an episode needs, and the matmul rate of this machine."""

import time
from dataclasses import dataclass

import torch

PRECISIONS = ("highest", "medium")
BF16 = "bf16"
MATRICES = ((2048, 1024, 4096), (2048, 4096, 1024), (4096, 2048, 2048))
"""Sizes (rows, inner, columns) of large matmuls; the fastest gives the rate."""

REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Forward passes over an episode's tokens; forward and backward count as three."""

    epochs: int

    @property
    def backbone(self) -> int:
        """Policy, reference, critic and reward once; policy and critic in every epoch."""
        return 4 + 2 * 3 * self.epochs

    @property
    def head(self) -> int:
        """Policy and reference once; the policy in every epoch."""
        return 2 + 3 * self.epochs


def episode_flops(
    *, backbone: int, head: int, prompt_tokens: float, response_tokens: float, epochs: int
) -> float:
    """Return FLOPs of the linear layers in one episode of PPO.

    Counts 2 FLOPs per weight and token. `backbone` and `head` are numbers of weights; the head runs
    at response tokens alone. Attention, norms and the optimizer are not counted.
    """
    passes = Passes(epochs=epochs)
    through_backbone = passes.backbone * backbone * (prompt_tokens + response_tokens)
    through_head = passes.head * head * response_tokens
    return 2 * (through_backbone + through_head)


def matmul_rate(precision: str, device: str, dtype: torch.dtype) -> float:
    """Return the best rate of large matmuls, FLOP/s."""
    torch.set_float32_matmul_precision(precision)
    return max(
        _rate_of(torch.randn(rows, inner), torch.randn(inner, columns), device, dtype)
        for rows, inner, columns in MATRICES
    )


def _rate_of(left: torch.Tensor, right: torch.Tensor, device: str, dtype: torch.dtype) -> float:
    left, right = left.to(device, dtype), right.to(device, dtype)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        left @ right
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return 2 * left.shape[0] * left.shape[1] * right.shape[1] / min(seconds)


def measured_rates(device: str, *, threads: int) -> dict[str, float]:
    """Return FLOP/s by fp32 precision, and of bfloat16."""
    torch.set_num_threads(threads)
    rates = {name: matmul_rate(name, device, torch.float32) for name in PRECISIONS}
    return rates | {BF16: matmul_rate("highest", device, torch.bfloat16)}
