"""Check before training that models, prompts and settings work together."""

import heapq
import logging
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.chat_template import is_messages
from ppo_core.data.encode_prompts import prompt_text
from ppo_core.data.prompt_set import PromptSet
from ppo_core.data.prompts import context_length
from ppo_core.data.text_config import text_config
from ppo_core.errors import DataError, ModelError
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.model_bundle import ModelBundle
from ppo_core.rollout.sample_responses import decoder_of

logger = logging.getLogger(__name__)

TRIED_PROMPTS = 100
"""A reward model that reads texts is tried on this number of prompts, the longest."""


def check_models(
    models: ModelBundle, prompts: PromptSet, tokenizer: PreTrainedTokenizerBase, config: PPOConfig
) -> None:
    """Raise if models, prompts and settings would fail during training.

    Raises:
        ModelError: the policy cannot be sampled from or saved, `stop_token_id` is not in its
            vocabulary, another model lacks embeddings for the policy's tokens, or the exact
            divergence needs a reference with as many tokens as the policy.
        DataError: a prompt with its response is too long for a model, or prompts are chats and a
            reward model has no chat template, or its template rejects a prompt.
    """
    _check_policy(models)
    require_stop_token(_config(models.policy.model), config.stop_token_id)
    # A pad token that was added to the tokenizer has no embedding, and is never sampled.
    known = min(len(tokenizer), _vocabulary(models.policy.model))
    longest = max(map(len, prompts.tokens)) + config.response_length
    has_chats = any(map(is_messages, prompts.prompts))
    for scorer in models.rewards.models():
        reads_tokens = scorer.reads_tokens_of(tokenizer)
        if reads_tokens:
            _check_reader("reward model", scorer.model, known, longest + scorer.end_of_text)
        if has_chats:
            _check_template(scorer)
        if has_chats or not reads_tokens:
            _try_as_texts(scorer, prompts, tokenizer, config.response_length)
    _check_reader("reference", models.reference.model, known, longest)
    sizes = [_vocabulary(one.model) for one in (models.policy, models.reference)]
    if config.kl_estimator == "full" and sizes[0] != sizes[1]:
        raise ModelError(
            f"kl_estimator='full' compares the probabilities of all tokens, but the policy has "
            f"{sizes[0]} tokens and the reference {sizes[1]}. Use a reference with as many tokens, "
            "or another kl_estimator."
        )
    # A script's own value model has no configuration.
    if models.critic is not None and hasattr(models.critic.model, "config"):
        _check_reader("critic", models.critic.model, known, longest)


def _check_policy(models: ModelBundle) -> None:
    model = models.policy.model
    decoder_of(models.policy)
    settings = model.generation_config
    if settings is not None:
        try:
            with TemporaryDirectory() as folder:
                settings.save_pretrained(folder)
        except ValueError as error:
            raise ModelError(
                f"The policy's generation_config is contradictory, so transformers would refuse "
                f"to save the trained policy: {error} Correct generation_config before training, "
                "for example with model.generation_config.do_sample = True."
            ) from error


def require_stop_token(config: Any, stop_token_id: int | None) -> None:
    """Raise unless `stop_token_id` is None or a token of the policy with this configuration.

    Raises:
        ModelError: `stop_token_id` is not in the vocabulary.
    """
    size = text_config(config).vocab_size
    if stop_token_id is not None and not 0 <= stop_token_id < size:
        raise ModelError(
            f"stop_token_id={stop_token_id} is not one of the policy's {size} token ids, "
            "so every response would have the maximum length. Set stop_token_id to one of them."
        )


def _check_reader(name: str, model: nn.Module, known: int, longest: int) -> None:
    if (size := _vocabulary(model)) < known:
        raise ModelError(
            f"The {name} {type(model).__name__} has embeddings for {size} tokens, but the policy "
            f"samples {known} tokens, so their tokenizers differ. Use a model with the policy's "
            "tokenizer, or wrap a reward model as RewardModel(model, tokenizer_of_model)."
        )
    context = context_length(_config(model))
    if context is not None and longest > context:
        raise DataError(
            f"The longest prompt with its response has {longest} tokens, but the context length "
            f"of the {name} is {context}. Shorten the prompts, or lower response_length."
        )


def _check_template(scorer: RewardModel) -> None:
    if scorer.tokenizer.chat_template is None:
        raise DataError(
            "Prompts are chat messages, but the reward model's tokenizer has no chat template. "
            "Set the tokenizer's chat_template, or pass the prompts as text."
        )


def _try_as_texts(
    scorer: RewardModel,
    prompts: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
    response_length: int,
) -> None:
    """Encode prompts as the reward model will read them: as texts, or by its own chat template.

    The longest prompts are tried, and one prompt for each order of roles.
    """
    lengths = list(map(len, prompts.tokens))
    tried = dict.fromkeys(heapq.nlargest(TRIED_PROMPTS, range(len(lengths)), lengths.__getitem__))
    orders: dict[tuple[str, ...], int] = {}
    for row, prompt in enumerate(prompts.prompts):
        if is_messages(prompt):
            orders.setdefault(tuple(message["role"] for message in prompt), row)
    context, longest = context_length(_config(scorer.model)), 0
    for row in tried | dict.fromkeys(orders.values()):
        prompt = prompts.prompts[row]
        readable = prompt if is_messages(prompt) else prompt_text(tokenizer, prompt)
        try:
            length = len(scorer.encode(readable, ""))
        except DataError as error:
            raise DataError(f"The reward model cannot read the prompt {row}: {error}") from error
        if context is not None and length >= context:
            raise DataError(
                f"The prompt {row} has {length} tokens for the reward model, whose context length "
                f"of {context} leaves no room for a response. Shorten or remove the prompt."
            )
        longest = max(longest, length)
    # A response has another number of tokens for the reward model than for the policy.
    if context is not None and longest + response_length > context:
        logger.warning(
            f"The longest prompt has {longest} tokens for the reward model. With a response of "
            f"{response_length} tokens it may exceed the context length of {context}, which would "
            "end the training. Shorten the prompts, or lower response_length."
        )


def _config(model: nn.Module) -> Any:
    config: Any = model.config
    return text_config(config)


def _vocabulary(model: nn.Module) -> int:
    size: int = _config(model).vocab_size
    return size
