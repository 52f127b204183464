"""Helpers of TRL's classic loop for sampling tokens and lengths."""

from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.algorithm.temperature import at_least_fp32
from ppo_core.algorithm.top_k_top_p import truncated
from ppo_core.errors import ConfigError, ModelError


@torch.no_grad()
def respond_to_batch(
    model: nn.Module,
    queries: Tensor,
    txt_len: int = 20,
    top_k: int = 0,
    top_p: float = 1.0,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `txt_len` tokens (B, txt_len) sampled after each of the unpadded queries (B, P).

    No token ends a response early. `ppo_core.algorithm.top_k_top_p.truncated` explains `top_k` and
    `top_p`. The model may have a value head, and its mode (training or evaluation) is not changed.
    Sampling uses no KV cache, so `model.generate` is faster for more than a few tokens.

    Raises:
        ModelError: the model has an encoder.
    """
    config: Any = model.config
    if config.is_encoder_decoder:
        raise ModelError(
            f"{type(model).__name__} has an encoder, so responses do not continue their queries. "
            "Call model.generate instead."
        )
    ids = queries
    for _ in range(txt_len):
        logits = at_least_fp32(model(ids)[0][:, -1])
        kept = truncated(logits, top_k=top_k, top_p=top_p)
        chosen = torch.multinomial(kept.softmax(dim=-1), 1, generator=generator)
        ids = torch.cat([ids, chosen], dim=1)
    return ids[:, queries.shape[1] :]


class LengthSampler:
    """Draws lengths uniformly from min_value, ..., max_value - 1."""

    def __init__(
        self, min_value: int, max_value: int, *, generator: torch.Generator | None = None
    ) -> None:
        """Set the bounds; max_value is excluded.

        Raises:
            ConfigError: the range is empty, or contains a length below 1.
        """
        if not 1 <= min_value < max_value:
            raise ConfigError(
                f"{min_value=} must be at least 1 and below {max_value=}, because lengths are "
                "drawn from min_value, ..., max_value - 1."
            )
        self.min_value = min_value
        self.max_value = max_value
        self._generator = generator

    def __call__(self) -> int:
        """Draw one length."""
        drawn = torch.randint(self.min_value, self.max_value, (), generator=self._generator)
        return int(drawn)
