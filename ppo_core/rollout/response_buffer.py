"""The responses that are being sampled; a response is cut at its stop token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_core.rollout.continuous_batching import ActiveSequences


@dataclass(frozen=True)
class ResponseBuffer:
    """The responses that are being sampled; each tensor corresponds to a tensor of `Rollout`.

    A response ends with its stop token.
    """

    ids: Tensor
    logprobs: Tensor
    behavior_logprobs: Tensor
    lengths: Tensor
    has_stop: Tensor

    @classmethod
    def empty(
        cls, num_responses: int, max_new_tokens: int, device: torch.device
    ) -> "ResponseBuffer":
        """Return empty responses; `lengths` is the maximum until a stop token is written."""
        shape = num_responses, max_new_tokens
        return cls(
            ids=torch.zeros(shape, dtype=torch.long, device=device),
            logprobs=torch.zeros(shape, device=device),
            behavior_logprobs=torch.zeros(shape, device=device),
            lengths=torch.full((num_responses,), max_new_tokens, device=device),
            has_stop=torch.zeros(num_responses, dtype=torch.bool, device=device),
        )

    def put(self, responses: Tensor, part: "ResponseBuffer") -> None:
        """Copy the responses of `part` into rows `responses` (b,)."""
        for full, of_part in zip(vars(self).values(), vars(part).values(), strict=True):
            full[responses] = of_part

    def write(
        self,
        active: ActiveSequences,
        tokens: Tensor,
        logprobs: Tensor,
        behavior_logprobs: Tensor,
        stop_token_id: int,
    ) -> Tensor:
        """Write the next token (b,) of each active response; return whether it is the stop token.

        This method does not wait for the device.
        """
        is_active, response, position = active.is_active, active.response, active.position
        self.ids[response, position] = torch.where(is_active, tokens, 0)
        self.logprobs[response, position] = torch.where(is_active, logprobs, 0)
        self.behavior_logprobs[response, position] = torch.where(is_active, behavior_logprobs, 0)
        is_stop = is_active & (tokens == stop_token_id)
        self.lengths[response] = torch.where(is_stop, position + 1, self.lengths[response])
        self.has_stop[response] |= is_stop
        return is_stop
