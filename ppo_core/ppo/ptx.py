"""PPO-ptx: mix pretraining texts into PPO, so that the policy forgets less of its pretraining.

    objective(policy) = E_rl[reward - kl_coef * KL] + ptx_coef * E_text[log policy(text)]

(arXiv:2203.02155, section 3.5, eq. 2.) This module computes the expectation over texts as a mean
over tokens, so a good ptx_coef does not depend on the length of the texts.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.masking import length_mask
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.batching import pad_rows
from ppo_core.data.chat_template import encode_chat, is_messages
from ppo_core.data.encode_prompts import encode_prompt
from ppo_core.data.prompts import Tokens, context_length
from ppo_core.data.types import TokenRows
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError, DataError, TrainingError
from ppo_core.models.critic import ActorCritic
from ppo_core.models.kernels.fused_linear_loss import TokenLoss


class PretrainingTexts:
    """An endless stream of texts; each epoch has a new order, which depends on the seed."""

    def __init__(
        self, token_rows: Sequence[Tokens], *, seed: int, max_length: int | None = None
    ) -> None:
        """Create the stream from texts as token ids; `max_length` is the policy's context length.

        Raises:
            DataError: there are no texts, or a text has fewer than 2 or more than max_length
                tokens.
        """
        _check_lengths(token_rows, max_length)
        self._texts = token_rows
        self._generator = torch.Generator().manual_seed(seed)
        self._start_pass()

    @cached_property
    def digest(self) -> str:
        """A short digest of all token ids, in the texts' order."""
        return hashlib.sha256(repr(self._texts).encode()).hexdigest()[:16]

    def next_texts(self, n: int) -> list[Tokens]:
        """Return the next n texts, as token ids; they may span several epochs."""
        return [self._texts[self._next_number()] for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-compatible state for `load_state_dict`."""
        return {
            "texts": len(self._texts),
            "position": self._position,
            "generator": self._state_at_start.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            TrainingError: the state was written with another number of texts.
        """
        if state["texts"] != len(self._texts):
            raise TrainingError(
                f"The checkpoint was written with {state['texts']} pretraining texts, but this run "
                f"has {len(self._texts)}, so their order would differ. Resume with the texts of "
                "the run that wrote the checkpoint."
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
    """Encode the rows of a data set; return None without a data set.

    A row is a text, a list of messages, or has the column "text" or "messages".

    Raises:
        ConfigError: only one of `dataset` and ptx_coef is given.
        DataError: `dataset` is a text or a mapping, or a text cannot be used.
    """
    if (dataset is None) != (config.ptx_coef == 0):
        raise ConfigError(
            "ptx_coef and pretrain_dataset must be set together; got "
            f"ptx_coef={config.ptx_coef} and pretrain_dataset={dataset!r:.40}. ptx_coef is the "
            "weight of the texts in pretrain_dataset."
        )
    if dataset is None:
        return None
    if isinstance(dataset, str | Mapping):
        # Iteration would give the characters of the text, or the names of the splits.
        raise DataError(
            f"pretrain_dataset={dataset!r:.80} is not a data set. Load the data set, choose a "
            "split, for example dataset['train'], or put a single text into a list."
        )
    tokens = [_encode_row(tokenizer, row, number) for number, row in enumerate(dataset)]
    return PretrainingTexts(tokens, seed=config.seed, max_length=context_length(model_config))


def _encode_row(tokenizer: PreTrainedTokenizerBase, row: Any, number: int) -> Tokens:
    """Return the token ids of a text, or of a conversation that ends with an assistant turn."""
    text = row.get("text") if isinstance(row, Mapping) else row
    if isinstance(text, str):
        return encode_prompt(tokenizer, text)
    messages = row.get("messages") if isinstance(row, Mapping) else row
    if is_messages(messages):
        return encode_chat(tokenizer, messages, end=False)
    raise DataError(
        f"Pretraining row {number} is {row!r:.80}, which is neither a text nor a row with the "
        "column text or messages. Rename the column."
    )


def joined_texts(texts: Sequence[Tokens]) -> TokenRows:
    """Return texts as rows: the first token is the prompt, and the loss counts all later tokens."""
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


def add_pretraining_gradients(
    texts: PretrainingTexts,
    module: nn.Module,
    engine: Engine,
    config: PPOConfig,
    *,
    num_texts: int,
) -> None:
    """Add the gradients of the language-modeling loss of the next texts to the PPO gradients.

    `module` is the prepared ActorCritic, and `num_texts` the number of texts over all processes.
    """
    models = cast(ActorCritic, engine.unwrap(module))
    size = config.per_device_train_batch_size * engine.num_processes
    drawn = [texts.next_texts(min(size, num_texts - n)) for n in range(0, num_texts, size)]
    num_tokens = sum(len(text) - 1 for batch in drawn for text in batch)
    for batch in drawn:
        own = batch[engine.rank :: engine.num_processes]
        rows = joined_texts(own or batch[:1]).to(engine.device)
        loss = pretraining_loss(config.ptx_coef / num_tokens if own else 0.0)
        with engine.accumulate_only(module, True), models.policy.backbone.products(rows.ids):
            if engine.is_plain:
                with engine.autocast():
                    states = models.policy.backbone.states(rows)
                    predicted, values = models.policy.predict(states, rows, 1.0, loss), None
            else:
                predicted, values = module(rows, 1.0, loss)
            # Give the critic a gradient of 0. If a parameter had no gradient in the first pass of
            # a step, ZeRO-3 would add later gradients to the previous step's gradients.
            of_critic = 0.0 if values is None else 0.0 * values.sum()
            engine.backward(predicted.loss + of_critic)


def pretraining_loss(weight: float) -> TokenLoss:
    """Return a loss function of tokens: the negative log-likelihood times `weight`.

    With weight = ptx_coef / (counted tokens of the step), the losses of a step add up to ptx_coef
    times the mean negative log-likelihood.
    """
    return lambda logprobs, _: -weight * logprobs


def _check_lengths(texts: Sequence[Tokens], max_length: int | None) -> None:
    if not texts:
        raise DataError("There are no pretraining texts. Provide texts, or set ptx_coef=0.")
    for number, text in enumerate(texts):
        if len(text) < 2:
            raise DataError(
                f"Pretraining text {number} has {len(text)} token(s), so it has no token to "
                "predict. Remove texts of fewer than 2 tokens."
            )
        if max_length is not None and len(text) > max_length:
            raise DataError(
                f"Pretraining text {number} has {len(text)} tokens, more than the policy's context "
                f"length of {max_length}. Split or shorten the text."
            )
