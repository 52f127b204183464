"""A chat model that judges in this process, with the transformers library."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.inputs.model_digests import digest_of_model
from pipeline.judges.chat_model import Question, Reply
from pipeline.settings.judge_config import JudgingConfig
from pipeline.storage.workspace import original_names
from ppo_core.config.placement import Precision, placement_for_reading
from ppo_core.data.batching import length_sorted_batches
from ppo_core.data.chat_template import encode_chat, render_chat
from ppo_core.data.encode_prompts import encode_prompt, response_texts
from ppo_core.data.prompts import Tokens, context_length
from ppo_core.errors import DataError, ModelError
from ppo_core.errors.out_of_memory import BatchSize
from ppo_core.io.folder_cache import digest_of
from ppo_core.models.loading import load_config, load_policy, load_tokenizer
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.sample_responses import sample_responses
from ppo_core.rollout.token_sampling import SamplingSettings, stop_token

SHORTEST_QUESTION: Question = [
    {"role": "system", "content": "system"},
    {"role": "user", "content": "user"},
]
"""A small question with the roles system and user, as in a judge's questions."""


class TransformersModel:
    """Answers questions with PPO's sampler, in batches of `JudgingConfig.concurrency` questions.

    The deadline, the retries and the budget of JudgingConfig apply only to servers.
    """

    def __init__(self, path: str, config: JudgingConfig, precision: Precision = "auto") -> None:
        """Load the model and the tokenizer of a folder or hub id; the weights have `precision`.

        Raises:
            ModelError: the model does not exist, is not decoder-only, or has no chat template for
                a system and a user message.
        """
        check_chat_model(path)
        self._tokenizer = load_tokenizer(path)
        placement = placement_for_reading(precision)
        model = load_policy(path, placement=placement)
        self._policy = LanguageModel(model)
        self._context = context_length(model.config)
        self._config = config
        self._sampling = SamplingSettings(
            stop_token_id=_end_of_turn(self._tokenizer, model),
            temperature=_temperature(model, config.sampling),
        )
        self.name = original_names(f"transformers:{path}")
        self.version = digest_of(
            [
                digest_of_model(path),
                vars(self._sampling),
                config.max_reply_tokens,
                str(placement.dtype),
            ]
        )
        self._batches = BatchSize(config.concurrency, "judging")

    def ask(self, questions: Sequence[Question], keep: Callable[[int, Reply], None]) -> None:
        """Answer every question and call `keep(number, reply)` after each batch.

        If a question plus `max_reply_tokens` exceeds the context, its reply is an error.
        """
        encoded = [encode_prompt(self._tokenizer, question) for question in questions]
        fitting = []
        for number, tokens in enumerate(encoded):
            if error := self._too_long(tokens):
                keep(number, Reply(None, error=error))
            else:
                fitting.append(number)
        if not fitting:
            return
        lengths = torch.tensor([len(encoded[number]) for number in fitting])
        for batch in length_sorted_batches(lengths, self._config.concurrency):
            numbers = [fitting[position] for position in batch.tolist()]
            uniforms = [self._uniforms(questions[number]) for number in numbers]
            replies = self._answer([encoded[number] for number in numbers], torch.stack(uniforms))
            for number, reply in zip(numbers, replies, strict=True):
                keep(number, reply)

    def _too_long(self, tokens: Tokens) -> str:
        """Return an error message if a question is too long, otherwise an empty string."""
        max_new_tokens = self._config.max_reply_tokens
        if self._context is None or len(tokens) + max_new_tokens <= self._context:
            return ""
        return (
            f"The question has {len(tokens)} tokens, and with max_reply_tokens={max_new_tokens} "
            f"that is more than {self._context}, the context of {self.name}. Lower "
            "max_reply_tokens, or name a judge with a longer context."
        )

    def _uniforms(self, question: Question) -> Tensor:
        """Return random numbers in [0, 1) that depend only on the question and not on its batch."""
        generator = torch.Generator().manual_seed(int(digest_of(question), 16))
        return torch.rand(self._config.max_reply_tokens, generator=generator)

    def _answer(self, prompts: list[Tokens], uniforms: Tensor) -> list[Reply]:
        rollout = self._batches.run(
            lambda rows: sample_responses(
                self._policy, prompts, uniforms, self._sampling, batch_size=rows
            )
        )
        lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
        texts = response_texts(self._tokenizer, rollout)
        return [Reply(text, tokens=n) for text, n in zip(texts, lengths, strict=True)]


def check_chat_model(path: str) -> None:
    """Check that a model can judge; read its configuration and tokenizer, but not its weights.

    Raises:
        ModelError: the model is not a decoder-only language model, or has no chat template for a
            system and a user message.
    """
    config = load_config(path)
    architectures = config.architectures or []
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ModelError(
            f"'{path}' is {', '.join(architectures)}, which gives scores and no replies. Set the "
            f"judge to reward-model:{path}, or name a chat model."
        )
    if config.is_encoder_decoder:
        raise ModelError(f"'{path}' has an encoder. Name a decoder-only chat model as judge.")
    try:
        render_chat(load_tokenizer(path), SHORTEST_QUESTION, answer_follows=True)
    except DataError as error:
        raise ModelError(f"'{path}' cannot be asked as a judge: {error}") from error


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> int:
    """Return the token that ends an answer.

    A model may have several end tokens (end of text, end of turn). Return the end token that the
    chat template writes after an answer. If the template writes none, return the tokenizer's.
    """
    named = model.generation_config.eos_token_id
    ends = named if isinstance(named, list) else [named]
    question = encode_prompt(tokenizer, SHORTEST_QUESTION)
    answered = encode_chat(
        tokenizer, [*SHORTEST_QUESTION, {"role": "assistant", "content": "A"}], end=False
    )
    after = (token for token in answered[len(question) :] if token in ends)
    return stop_token(tokenizer, "eos", next(after, None))


def _temperature(model: PreTrainedModel, sampling: str) -> float:
    """Return 0 for greedy sampling, else the model's default temperature; 1 without a default."""
    own = model.generation_config.temperature
    return 0.0 if sampling == "greedy" else 1.0 if own is None else own
