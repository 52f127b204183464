"""Sampling helpers of the classic PPO loop."""

from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.algorithm.logits import at_least_fp32
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
    """Sample `txt_len` tokens after each of the queries (B, P): returns (B, txt_len).

    For queries of one length, without padding; no token ends a response. `top_k` and `top_p`
    are as in `ppo_core.algorithm.top_k_top_p.truncated`. The model, plain or with a value head,
    keeps its mode, and reads the whole text again for every token: for more than a few tokens
    `model.generate` is faster.

    Raises:
        ModelError: the model has an encoder.
    """
    config: Any = model.config
    if config.is_encoder_decoder:
        raise ModelError(
            f"{type(model).__name__} has an encoder, and a response is no continuation of its "
            "query. Use model.generate."
        )
    ids = queries
    for _ in range(txt_len):
        logits = at_least_fp32(model(ids)[0][:, -1])
        kept = truncated(logits, top_k=top_k, top_p=top_p)
        chosen = torch.multinomial(kept.softmax(dim=-1), 1, generator=generator)
        ids = torch.cat([ids, chosen], dim=1)
    return ids[:, queries.shape[1] :]


class LengthSampler:
    """Draws lengths, each of min_value, ..., max_value - 1 as likely as the others."""

    def __init__(
        self, min_value: int, max_value: int, *, generator: torch.Generator | None = None
    ) -> None:
        """Take the bounds, the upper one excluded.

        Raises:
            ConfigError: there is no length of at least 1 between them.
        """
        if not 1 <= min_value < max_value:
            raise ConfigError(
                f"{min_value=} and {max_value=} must be at least 1 and apart: lengths are drawn "
                "from min_value up to max_value - 1."
            )
        self.min_value = min_value
        self.max_value = max_value
        self._generator = generator

    def __call__(self) -> int:
        """One length."""
        drawn = torch.randint(self.min_value, self.max_value, (), generator=self._generator)
        return int(drawn)
