"""Texts to token ids and back, and the endless stream of prompts of a run."""

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from ppo_core.errors import DataError
from ppo_core.records import Rollout

Tokens = list[int]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tokens:
    """Token ids of a prompt, with the tokenizer's own start tokens and without an end token."""
    ids: Tokens = tokenizer(prompt)["input_ids"]
    plain: Tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ends_by_itself = plain[-1:] == [tokenizer.eos_token_id]
    if ids[-1:] == [tokenizer.eos_token_id] and not ends_by_itself:
        return ids[:-1]
    return ids


def encode_response(tokenizer: PreTrainedTokenizerBase, text: str, *, end: bool) -> Tokens:
    """Token ids of a response; `end` appends the end-of-sequence token.

    Supervised training, validation and scoring all encode prompt and response apart and join
    the ids, so that a model is never scored on other tokens than it was trained on (TRL #1702).
    """
    ids: Tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not end:
        return ids
    if tokenizer.eos_token_id is None:
        raise DataError("The tokenizer has no end-of-sequence token to end a response with.")
    return [*ids, tokenizer.eos_token_id]


def response_text(tokenizer: PreTrainedTokenizerBase, prompt: Tokens, response: Tokens) -> str:
    """The text that a response adds to its prompt, special tokens left out.

    Tokenizers that mark word starts drop a leading space when a response is decoded alone;
    it is kept here, so that prompt + text reads as the model wrote it.
    """
    before = str(tokenizer.decode(prompt, skip_special_tokens=True))
    whole = str(tokenizer.decode([*prompt, *response], skip_special_tokens=True))
    if whole.startswith(before):
        return whole[len(before) :]
    return str(tokenizer.decode(response, skip_special_tokens=True))


def response_texts(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """The text of each response of a rollout, up to its stop token."""
    return [
        response_text(tokenizer, prompt[:prompt_length], response[:response_length])
        for prompt, prompt_length, response, response_length in zip(
            rollout.prompt_ids.tolist(),
            rollout.prompt_lengths.tolist(),
            rollout.response_ids.tolist(),
            (rollout.response_lengths - rollout.has_stop.long()).tolist(),
            strict=True,
        )
    ]


def check_prompt_lengths(
    prompts: Sequence[Tokens], *, context: int | None, response_length: int
) -> None:
    """Refuse prompts that leave no room for a response; a context of None has no bound.

    Raises:
        DataError: a prompt has no token, or more than `context - response_length`.
    """
    if not prompts:
        raise DataError("There are no prompts; PPO needs at least one.")
    empty = [i for i, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise DataError(
            f"{len(empty)} of {len(prompts)} prompts have no token, the first in row {empty[0]}. "
            "Remove them."
        )
    if context is None:
        return
    room = context - response_length
    long = [i for i, prompt in enumerate(prompts) if len(prompt) > room]
    if long:
        worst = max(long, key=lambda i: len(prompts[i]))
        raise DataError(
            f"{len(long)} of {len(prompts)} prompts are longer than {room} tokens, the context of "
            f"{context} less response_length={response_length}; the longest, in row {worst}, has "
            f"{len(prompts[worst])}. Shorten or remove them, or lower response_length."
        )


class PromptStream:
    """Batches of row numbers without end: every pass over the data in a new seeded order."""

    def __init__(self, num_prompts: int, *, seed: int) -> None:
        """Draw from rows 0 .. num_prompts - 1."""
        self._num_prompts = num_prompts
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = self._draw_rows()

    def _draw_rows(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self._num_prompts, generator=self._generator).tolist()

    def next_batch(self, batch_size: int) -> list[int]:
        """The next row numbers; a batch may span two passes, so none is dropped."""
        return [next(self._rows) for _ in range(batch_size)]
