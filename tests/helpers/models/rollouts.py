"""A random rollout, without sampling."""

import torch

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.types import Rollout
from tests.helpers.models.tiny import VOCABULARY

TEMPERATURE = 0.7


def make_rollout(prompt_lengths=(3, 7, 1), response_lengths=(5, 2, 4), *, seed=0) -> Rollout:
    """Return random prompts and responses of these lengths, with nonzero padding."""
    torch.manual_seed(seed)
    prompts = torch.randint(2, VOCABULARY, (len(prompt_lengths), max(prompt_lengths)))
    responses = torch.randint(2, VOCABULARY, (len(response_lengths), max(response_lengths)))
    return Rollout(
        prompt_ids=prompts,
        prompt_lengths=torch.tensor(prompt_lengths),
        response_ids=responses,
        response_lengths=torch.tensor(response_lengths),
        has_stop=torch.zeros(len(prompt_lengths), dtype=torch.bool),
        logprobs=torch.zeros(responses.shape),
        temperature=TEMPERATURE,
        response_mask=length_mask(torch.tensor(response_lengths), responses.shape[1]),
    )


def row_of(rollout: Rollout, b: int) -> list[int]:
    prompt = rollout.prompt_ids[b, : rollout.prompt_lengths[b]]
    return torch.cat([prompt, rollout.response_ids[b, : rollout.response_lengths[b]]]).tolist()
