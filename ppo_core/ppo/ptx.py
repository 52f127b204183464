"""Pretraining texts mixed into PPO, so that the policy forgets less: PPO-ptx.

    objective(policy) = E_rl[reward - kl_coef * KL] + ptx_coef * E_text[log policy(text)]

(arXiv:2203.02155, section 3.5, eq. 2.) The expectation is per token here, so that ptx_coef does
not depend on the length of the texts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.masking import length_mask
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.batching import pad_rows
from ppo_core.data.chat_template import encode_chat, is_messages
from ppo_core.data.prompts import Tokens, context_length, encode_prompt
from ppo_core.data.types import TokenRows
from ppo_core.errors import ConfigError, DataError, TrainingError
from ppo_core.models.kernels.fused_linear_loss import TokenLoss


class PretrainingTexts:
    """Batches of texts without end: every pass over them in a new seeded order."""

    def __init__(
        self, token_rows: Sequence[Tokens], *, seed: int, max_length: int | None = None
    ) -> None:
        """Take the texts as token ids; `max_length` is the most tokens the policy reads.

        Raises:
            DataError: there are no texts, or one has fewer than 2 tokens or more than max_length.
        """
        _check_lengths(token_rows, max_length)
        self._texts = token_rows
        self._generator = torch.Generator().manual_seed(seed)
        self._start_pass()

    def next_texts(self, n: int) -> list[Tokens]:
        """The next n texts, as token ids; they may span two passes."""
        return [self._texts[self._next_number()] for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on from here, as JSON takes it."""
        return {
            "texts": len(self._texts),
            "position": self._position,
            "generator": self._state_at_start.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called.

        Raises:
            TrainingError: it was called with another number of texts.
        """
        if state["texts"] != len(self._texts):
            raise TrainingError(
                f"The checkpoint was written with {state['texts']} pretraining texts, here are "
                f"{len(self._texts)}: their order would be another. Resume with the same texts."
            )
        self._generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        self._start_pass()
        self._position = state["position"]

    def _start_pass(self) -> None:
        self._state_at_start = self._generator.get_state()
        self._order = torch.randperm(len(self._texts), generator=self._generator).tolist()
        self._position = 0

    def _next_number(self) -> int:
        if self._position == len(self._order):
            self._start_pass()
        self._position += 1
        return int(self._order[self._position - 1])


def make_pretraining_texts(
    dataset: Any, tokenizer: PreTrainedTokenizerBase, model_config: Any, config: PPOConfig
) -> PretrainingTexts | None:
    """The texts of a data set, None without one: rows of "text" or "messages", or just texts.

    Raises:
        ConfigError: there are texts and no ptx_coef, or the other way round.
        DataError: a text cannot be used.
    """
    if (dataset is None) != (config.ptx_coef == 0):
        raise ConfigError(
            f"ptx_coef={config.ptx_coef} and pretrain_dataset={dataset!r:.40}: the texts and their "
            "weight go together. Give both, or neither."
        )
    if dataset is None:
        return None
    tokens = [_encode_row(tokenizer, row, number) for number, row in enumerate(dataset)]
    return PretrainingTexts(tokens, seed=config.seed, max_length=context_length(model_config))


def _encode_row(tokenizer: PreTrainedTokenizerBase, row: Any, number: int) -> Tokens:
    """Token ids of a whole text or conversation, the assistant's last answer included."""
    text = row.get("text") if isinstance(row, Mapping) else row
    if isinstance(text, str):
        return encode_prompt(tokenizer, text)
    messages = row.get("messages") if isinstance(row, Mapping) else row
    if is_messages(messages):
        return encode_chat(tokenizer, messages, end=False)
    raise DataError(
        f"Pretraining row {number} is {row!r:.80}: neither text, nor a row with the column text or "
        "messages. Rename the column."
    )


def joined_texts(texts: Sequence[Tokens]) -> TokenRows:
    """Texts as rows in which the first token is the prompt, and all that follow are counted."""
    ids, lengths = pad_rows(texts)
    row, state = length_mask(lengths - 1, ids.shape[1]).nonzero(as_tuple=True)
    return TokenRows(
        ids=ids,
        lengths=lengths,
        prompt_lengths=torch.ones_like(lengths),
        row=row,
        state=state,
        targets=ids[row, state + 1],
    )


def pretraining_loss(weight: float) -> TokenLoss:
    """Negative log-likelihood of each counted token at temperature 1, times a weight.

    With ptx_coef / (counted tokens of the step) the sum is ptx_coef times their mean.
    """
    return lambda logprobs, _: -weight * logprobs


def _check_lengths(texts: Sequence[Tokens], max_length: int | None) -> None:
    if not texts:
        raise DataError("There are no pretraining texts. Give some, or set ptx_coef=0.")
    for number, text in enumerate(texts):
        if len(text) < 2:
            raise DataError(
                f"Pretraining text {number} has {len(text)} token(s): nothing in it follows from "
                "what comes before. Remove texts of fewer than 2 tokens."
            )
        if max_length is not None and len(text) > max_length:
            raise DataError(
                f"Pretraining text {number} has {len(text)} tokens, more than the {max_length} "
                "that the policy reads. Split or shorten it."
            )
