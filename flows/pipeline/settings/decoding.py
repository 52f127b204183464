"""How a policy decodes the answers that are judged."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How the answers that were judged were decoded: what a served version does by default."""

    response_length: int
    """Most tokens of an answer."""

    temperature: float
    """0 takes the likeliest token."""

    top_k: int = 0
    """Sample from this many tokens only; 0 from all."""

    top_p: float = 1.0
    """Sample from the likeliest tokens that hold this probability; 1 from all."""

    stop_token: str | None = "eos"
    """What ends an answer; None where answers run to their full length."""

    stop_token_id: int | None = None
    """Token that ends an answer, in the place of `stop_token`."""

    def arguments(self) -> dict[str, Any]:
        """The same as arguments of transformers' `generate`, but for the stop token.

        Without those of sampling where nothing is sampled: transformers warns of them.
        """
        length = {"max_new_tokens": self.response_length, "do_sample": self.temperature > 0}
        if not length["do_sample"]:
            return length
        return length | {
            "temperature": float(self.temperature),
            "top_k": self.top_k,
            "top_p": float(self.top_p),
        }
