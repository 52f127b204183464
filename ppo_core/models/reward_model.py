"""The reward model, which scores a prompt with its response."""

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.algorithm.masking import length_mask
from ppo_core.algorithm.temperature import at_least_fp32
from ppo_core.data.batching import length_sorted_batches, pad_rows
from ppo_core.data.chat_template import Messages
from ppo_core.data.encode_prompts import encode_dialogue
from ppo_core.data.prompts import context_length
from ppo_core.errors import DataError, ModelError
from ppo_core.errors.out_of_memory import BatchSize
from ppo_core.models.adapters import is_peft
from ppo_core.models.backbones import DecoderBackbone


class RewardModel:
    """A sequence classifier whose single label is the score of a prompt with its response."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        bias: float = 0.0,
        gain: float = 1.0,
        end_of_text: bool = True,
    ) -> None:
        """Wrap a model and its tokenizer; scores are (output - `bias`) * `gain`.

        Set `end_of_text` if the model was trained on texts that end in the end-of-sequence token.
        This token is then appended to every scored text, even to a truncated response, because the
        head was trained at this token and is less accurate at other tokens.

        Raises:
            ModelError: the model has several labels or an adapter, or `end_of_text` is True and
                the tokenizer has no end-of-sequence token.
        """
        if is_peft(model):
            raise ModelError(
                "The reward model has an adapter, which is not supported. Merge the adapter by "
                "model.merge_and_unload(), or load it onto the policy's base model by "
                "load_reward_adapter."
            )
        if model.config.num_labels != 1:
            raise ModelError(
                f"The reward model {type(model).__name__} has {model.config.num_labels} labels, "
                "but must have one: its score. Train a reward model with num_labels=1."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.bias = bias
        self.gain = gain
        self.end_of_text = end_of_text
        # Wanted batch size -> the batch size that fits into the memory.
        self._batches: dict[int, BatchSize] = {}
        if end_of_text and tokenizer.eos_token_id is None:
            raise ModelError(
                "The reward model's tokenizer has no end-of-sequence token to end a text with. "
                "Set end_of_text = false if the model was trained without that token."
            )

    @property
    def members(self) -> tuple["RewardModel", ...]:
        """Return the models whose mean score is used: only this model."""
        return (self,)

    @property
    def lm_head(self) -> nn.Linear | None:
        """Return the head of a decoder-only classifier, or None for another classifier."""
        head = getattr(self.model, "score", None)
        return head if isinstance(head, nn.Linear) else None

    @cached_property
    def backbone(self) -> DecoderBackbone:
        """Return the model without its head."""
        own: DecoderBackbone | None = getattr(self.model, "backbone", None)
        return DecoderBackbone(self.model.base_model) if own is None else own

    def reads_tokens_of(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether this model's tokenizer and `tokenizer` have the same vocabulary.

        If the vocabularies differ, the reward model must score texts instead of token ids. Pad
        tokens may differ: training scripts often add a pad token, and no text contains it.
        """
        different = self.tokenizer.get_vocab().items() ^ tokenizer.get_vocab().items()
        return {token for token, _ in different} <= {tokenizer.pad_token, self.tokenizer.pad_token}

    @torch.no_grad()
    def score_rows(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return scores (B,) of right-padded sequences (B, S) of the given lengths (B,).

        A decoder-only model scores at each sequence's last token. The lengths determine the last
        token, because a search for the first pad token would fail if pad and end-of-sequence are
        the same token (TRL #5303).

        Raises:
            DataError: a sequence is longer than the model's context.
        """
        context = context_length(self.model.config)
        if context is not None and int(lengths.max()) > context:
            raise DataError(
                f"A prompt with its response has {int(lengths.max())} tokens for the reward model, "
                f"whose context is {context}. Shorten the prompts, or lower response_length."
            )
        if self.lm_head is not None:
            rows = torch.arange(len(ids), device=ids.device)
            scores = self.lm_head(self.backbone.states_at(ids, rows, lengths - 1, lengths))[:, 0]
        else:
            mask = length_mask(lengths, ids.shape[1])
            scores = self.model(input_ids=ids, attention_mask=mask.long()).logits[:, 0]
        return (at_least_fp32(scores) - self.bias) * self.gain

    def encode(self, prompt: str | Messages, response: str) -> list[int]:
        """Return token ids of a prompt with its response, by the reward model's tokenizer."""
        return encode_dialogue(self.tokenizer, prompt, response, end=self.end_of_text)

    def can_read(self, row: Sequence[int]) -> bool:
        """Return whether a token sequence has a token and fits the model's context."""
        context = context_length(self.model.config)
        return len(row) > 0 and (context is None or len(row) <= context)

    def score_encoded(self, rows: Sequence[list[int]], batch_size: int) -> Tensor:
        """Return scores (B,), on the CPU, of token sequences.

        `batch_size` sequences are scored at a time, or fewer once memory has been full.

        Raises:
            DataError: a sequence is empty, or longer than the model's context.
        """
        if not all(rows):
            raise DataError(
                f"Text {[len(row) for row in rows].index(0)} has no token, so the reward model "
                "cannot score it (the first text has number 0). Remove the text."
            )
        batches = self._batches.setdefault(batch_size, BatchSize(batch_size, "scoring"))
        return batches.run(partial(self._score_batches, rows))

    def _score_batches(self, rows: Sequence[list[int]], batch_size: int) -> Tensor:
        scores = torch.empty(len(rows))
        device = self.model.device
        for batch in length_sorted_batches(torch.tensor([len(row) for row in rows]), batch_size):
            ids, lengths = pad_rows([rows[i] for i in batch.tolist()])
            scores[batch] = self.score_rows(ids.to(device), lengths.to(device)).cpu()
        return scores

    def score_texts(
        self, prompts: Sequence[str | Messages], responses: Sequence[str], batch_size: int = 64
    ) -> Tensor:
        """Return scores (B,), on the CPU, of one response to each prompt."""
        rows = [self.encode(*texts) for texts in zip(prompts, responses, strict=True)]
        return self.score_encoded(rows, batch_size)


class RewardEnsemble(RewardModel):
    """Several reward models with one tokenizer; the score is the mean of the members' scores."""

    def __init__(self, members: Sequence[RewardModel]) -> None:
        """Take at least one reward model; `model` and `tokenizer` are from the first model.

        Raises:
            ModelError: the vocabularies of the members' tokenizers differ.
        """
        first = members[0]
        for number, one in enumerate(members, start=1):
            if not one.reads_tokens_of(first.tokenizer):
                raise ModelError(
                    f"The tokenizers of member 1 and member {number} of the reward model have "
                    "different vocabularies, so one of them would read wrong tokens. Use members "
                    "with one tokenizer."
                )
        super().__init__(
            first.model,
            first.tokenizer,
            bias=first.bias,
            gain=first.gain,
            end_of_text=first.end_of_text,
        )
        self._members = tuple(members)

    @property
    def members(self) -> tuple[RewardModel, ...]:
        """Return the models whose mean score is used."""
        return self._members

    def can_read(self, row: Sequence[int]) -> bool:
        """Return whether a token sequence has a token and fits the contexts of all members."""
        return all(member.can_read(row) for member in self._members)

    def score_rows(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the mean scores (B,), see `RewardModel.score_rows`."""
        return torch.stack([one.score_rows(ids, lengths) for one in self.members]).mean(dim=0)
