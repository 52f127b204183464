"""Masks, masked statistics and log-probabilities of tokens.

Legend, here and everywhere: B responses, P prompt tokens, T response tokens, S = P + T
tokens of a joined row, N counted tokens, D hidden size, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """True for the first `lengths[b]` of `width` places: (B,) -> (B, width)."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def pad_rows(rows: Sequence[Sequence[int]], *, side: str = "right") -> tuple[Tensor, Tensor]:
    """Lists of token ids as one tensor (B, longest) filled up with 0, and their lengths (B,).

    Nothing tells a filler from a token but the lengths, so any token may be 0.
    """
    lengths = torch.tensor([len(row) for row in rows])
    width = int(lengths.max())
    padded = torch.zeros(len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        start = width - len(row) if side == "left" else 0
        padded[b, start : start + len(row)] = torch.as_tensor(row, dtype=torch.long)
    return padded, lengths


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of the values where the mask holds; what the mask hides may even be NaN."""
    return torch.where(mask, values, 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values where the mask holds; 0 where it never holds."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def standardise(values: Tensor, mask: Tensor, *, keep_mean: bool, epsilon: float = 1e-8) -> Tensor:
    """Values (B, T) scaled to standard deviation 1 under the mask, and 0 outside of it.

        out = (values - mean) / sqrt(variance + epsilon)  [+ mean, if keep_mean]

    Mean and variance (with Bessel's correction) are those of the counted tokens. Advantages
    lose their mean, rewards keep it (arXiv:1909.08593; arXiv:2403.17031, detail 18).
    """
    mean = masked_mean(values, mask)
    deviations = torch.where(mask, values - mean, 0)
    variance = (deviations**2).sum() / (mask.sum() - 1).clamp(min=1)
    scaled = deviations * torch.rsqrt(variance + epsilon)
    return torch.where(mask, scaled + mean, 0) if keep_mean else scaled


def at_least_fp32(tensor: Tensor) -> Tensor:
    """Half precision as fp32; anything finer as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Logits (..., V) divided by the temperature, at least in fp32.

    The only place where the temperature is applied: the policy is softmax(tempered logits) in
    sampling, reference and update alike. They are often the largest tensor of a pass, so where no
    gradient is recorded those of fp32 are divided in their own place.
    """
    logits = at_least_fp32(logits)
    if temperature == 1:
        return logits
    return logits / temperature if logits.requires_grad else logits.div_(temperature)
