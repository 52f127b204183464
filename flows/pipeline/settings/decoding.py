"""Decoding of a policy's answers."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a policy's answers are decoded.

    A registered version stores the values of its evaluation; they are the defaults of a service.
    """

    response_length: int
    """Maximum number of tokens of an answer."""

    temperature: float
    """Sampling temperature; 0 always takes the likeliest token."""

    top_k: int = 0
    """Sample from this number of likeliest tokens; 0 samples from all tokens."""

    top_p: float = 1.0
    """Sample from the likeliest tokens with this total probability; 1 samples from all tokens."""

    stop_token: str | None = "eos"
    """Name of the token that ends an answer; if None, all answers have full length."""

    stop_token_id: int | None = None
    """Id of the token that ends an answer; overrides `stop_token`."""

    def arguments(self) -> dict[str, Any]:
        """Return arguments of transformers' `generate`, without the stop token.

        At temperature 0, sampling arguments are omitted, because transformers warns about them.
        """
        length = {"max_new_tokens": self.response_length, "do_sample": self.temperature > 0}
        if not length["do_sample"]:
            return length
        return length | {
            "temperature": float(self.temperature),
            "top_k": self.top_k,
            "top_p": float(self.top_p),
        }
