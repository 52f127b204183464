"""What a response is worth: reward models and plain functions, weighted, each by its name."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ppo_core.data.batching import token_batches
from ppo_core.data.chat_template import is_messages
from ppo_core.data.prompts import Prompt, prompt_text, response_texts
from ppo_core.data.types import Rollout
from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.reward_model import RewardModel

RewardFunction = Callable[[list[str], list[str]], Sequence[float]]
"""Takes the prompts and the responses as texts, gives one number for each response."""


class RewardSource(Protocol):
    """Scores a rollout."""

    def __call__(self, prompts: Sequence[Prompt], rollout: Rollout) -> Tensor:
        """Scores (B,), on the rollout's device."""
        ...


@dataclass(frozen=True)
class ModelReward:
    """The scores of a reward model."""

    reward_model: RewardModel
    tokenizer: PreTrainedTokenizerBase
    """The policy's."""
    batch_size: int

    def __call__(self, prompts: Sequence[Prompt], rollout: Rollout) -> Tensor:
        """Scores (B,) of the very tokens that were sampled, or of their texts.

        A reward model that does not share the policy's tokens, or has a chat template to
        render, encodes the texts by its own tokenizer (TRL #1674, #3595).
        """
        chat = any(is_messages(prompt) for prompt in prompts)
        if self._reads_tokens and not chat:
            return score_tokens(self.reward_model, rollout, self.batch_size)
        readable = [
            prompt if is_messages(prompt) else prompt_text(self.tokenizer, prompt)
            for prompt in prompts
        ]
        responses = response_texts(self.tokenizer, rollout)
        scores = self.reward_model.score_texts(readable, responses, self.batch_size)
        return scores.to(rollout.logprobs)

    @cached_property
    def _reads_tokens(self) -> bool:
        # Compares two full vocabularies: once, and not for every batch.
        return self.reward_model.reads_tokens_of(self.tokenizer)


def score_tokens(reward_model: RewardModel, rollout: Rollout, batch_size: int) -> Tensor:
    """Return scores (B,) of the sampled tokens themselves, for a reward model that reads them.

    Replaces the stop token by the end-of-sequence token that the reward model was trained with.
    """
    scores = torch.empty(len(rollout), device=rollout.logprobs.device)
    for batch in token_batches(rollout.row_lengths, batch_size):
        ids = rollout.token_rows(batch).ids
        lengths = rollout.row_lengths[batch] - rollout.has_stop[batch].long()
        if reward_model.end_of_text:
            ids = torch.nn.functional.pad(ids, (0, 1))
            end = torch.full_like(lengths, int(reward_model.tokenizer.eos_token_id))
            ids = ids.scatter(1, lengths[:, None], end[:, None])
            lengths = lengths + 1
        scores[batch] = reward_model.score_rows(ids, lengths)
    return scores


@dataclass(frozen=True)
class FunctionReward:
    """The numbers that a plain function gives."""

    name: str
    function: RewardFunction
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, prompts: Sequence[Prompt], rollout: Rollout) -> Tensor:
        """Scores (B,) of the texts.

        Raises:
            ModelError: the function does not give one number for each response.
        """
        texts = [prompt_text(self.tokenizer, prompt) for prompt in prompts]
        device = rollout.logprobs.device.type
        with torch.autocast(device, enabled=False):  # its precision is its own
            given = self.function(texts, response_texts(self.tokenizer, rollout))
        try:
            scores = torch.as_tensor(given, dtype=torch.float32)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"The reward function {self.name} gave {given!r:.80}, not numbers: {error}. "
                "Return one float for each response."
            ) from error
        if scores.shape != (len(rollout),):
            raise ModelError(
                f"The reward function {self.name} gave numbers of shape {tuple(scores.shape)} "
                f"for {len(rollout)} responses. Return one float for each response."
            )
        # A function may have computed with gradients; the loss must not reach into it.
        return scores.detach().to(rollout.logprobs)


class RewardMix:
    """The weighted sum of several rewards."""

    def __init__(
        self, sources: Mapping[str, RewardSource], weights: Sequence[float] | None
    ) -> None:
        """Take the rewards by their names, and a weight for each; None weighs all alike, 1.

        Raises:
            ConfigError: there is not one weight for each.
        """
        self.sources = dict(sources)
        self.weights = [1.0] * len(sources) if weights is None else list(weights)
        if len(self.weights) != len(self.sources):
            raise ConfigError(
                f"reward_weights={self.weights} has {len(self.weights)} numbers for "
                f"{len(self.sources)} rewards ({', '.join(self.sources)}). Give one for each."
            )

    def __call__(
        self, prompts: Sequence[Prompt], rollout: Rollout
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The weighted sum (B,), and each reward's own scores (B,) by its name."""
        parts = {name: source(prompts, rollout) for name, source in self.sources.items()}
        weighted = zip(self.weights, parts.values(), strict=True)
        return torch.stack([weight * scores for weight, scores in weighted]).sum(dim=0), parts

    def models(self) -> list[RewardModel]:
        """The reward models among the rewards."""
        kept = self.sources.values()
        return [source.reward_model for source in kept if isinstance(source, ModelReward)]


def make_rewards(
    given: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    weights: Sequence[float] | None = None,
) -> RewardMix:
    """Rewards as a script hands them over: one, a list of them, or a dict with their names.

    Each is a `RewardModel`, a `...ForSequenceClassification` that reads the policy's tokens, or
    a function of prompts and responses.

    Raises:
        ModelError: one is nothing of these.
        ConfigError: there is none, two have the same name, or there is not one weight for each.
    """
    if isinstance(given, Mapping):
        named = dict(given)
    else:
        several = list(given) if isinstance(given, list | tuple) else [given]
        names = [_name_of(reward) for reward in several]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigError(
                f"Several rewards have the name {twice[0]!r}, so their metrics would be one. "
                "Hand them over as a dict with a name for each."
            )
        named = dict(zip(names, several, strict=True))
    if not named:
        raise ConfigError("There is no reward: nothing would be learned. Hand one over.")
    return RewardMix(
        {name: _make_source(name, one, tokenizer, batch_size) for name, one in named.items()},
        weights,
    )


def _name_of(reward: Any) -> str:
    model = reward.model if isinstance(reward, RewardModel) else reward
    if isinstance(model, nn.Module):
        return type(model).__name__
    return str(getattr(model, "__name__", type(model).__name__))


def _make_source(
    name: str, reward: Any, tokenizer: PreTrainedTokenizerBase, batch_size: int
) -> RewardSource:
    if isinstance(reward, nn.Module):
        if not hasattr(getattr(reward, "config", None), "num_labels") or not hasattr(
            reward, "score"
        ):
            raise ModelError(
                f"The reward {name} is a {type(reward).__name__}, which has no head that scores. "
                "Use a ...ForSequenceClassification with num_labels=1, ppo_core.load_reward_model"
                "(path), or a function of prompts and responses."
            )
        has_end = tokenizer.eos_token_id is not None
        reward = RewardModel(reward, tokenizer, end_of_text=has_end)  # type: ignore[arg-type]
    if isinstance(reward, RewardModel):
        return ModelReward(reward, tokenizer, batch_size)
    if callable(reward):
        return FunctionReward(name, reward, tokenizer)
    raise ModelError(
        f"The reward {name} is {reward!r:.80}: neither a model nor a function of prompts and "
        "responses."
    )
