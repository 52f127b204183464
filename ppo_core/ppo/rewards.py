"""The rewards of responses: a weighted sum of reward models and functions."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.config.reward_names import disagreement_names
from ppo_core.data.batching import scoring_batches, token_batches
from ppo_core.data.chat_template import is_messages
from ppo_core.data.encode_prompts import prompt_text, response_texts
from ppo_core.data.prompts import Prompt
from ppo_core.data.reward_columns import NO_COLUMNS, AskedColumns, Columns, asked_columns
from ppo_core.data.types import Rollout, Scores
from ppo_core.errors import ConfigError, ModelError, user_code_errors
from ppo_core.io.progress_bar import each_pass
from ppo_core.models.adapters import is_peft
from ppo_core.models.files.merge_adapter import merged_copy
from ppo_core.models.reward_adapter import AdapterClassifier
from ppo_core.models.reward_model import RewardModel
from ppo_core.models.script_modules import has_own_score, score_rows

RewardFunction = Callable[..., Sequence[float]]
"""A function that takes prompts and responses as texts, and returns one number for each response.

The function may also take columns of the prompts' rows by keyword, as in
`reward(prompts, responses, reference)` or `reward(prompts, responses, **columns)`. Each column is a
list with one value for each response.
"""


class RewardSource(Protocol):
    """Scores a rollout."""

    def __call__(
        self, prompts: Sequence[Prompt], rollout: Rollout, columns: Columns = NO_COLUMNS
    ) -> Tensor:
        """Return scores (B,) on the rollout's device; `columns` come from the prompts' rows."""
        ...


@dataclass(frozen=True)
class ModelReward:
    """Scores rollouts with a reward model."""

    reward_model: RewardModel
    tokenizer: PreTrainedTokenizerBase
    """The policy's tokenizer."""
    batch_size: int
    equal_passes: bool = False
    """Whether each pass waits for all processes, see `Engine.requires_equal_passes`."""

    def __call__(
        self, prompts: Sequence[Prompt], rollout: Rollout, columns: Columns = NO_COLUMNS
    ) -> Tensor:
        """Return scores (B,) of the sampled tokens, or of the texts of prompts and responses.

        If the policy has another vocabulary than the reward model, or a prompt is a chat, the
        reward model's own tokenizer and chat template encode the texts (TRL #1674, #3595).
        """
        chat = any(is_messages(prompt) for prompt in prompts)
        if self.reads_tokens and not chat:
            return score_tokens(
                self.reward_model, rollout, self.batch_size, equal_passes=self.equal_passes
            )
        readable = [
            prompt if is_messages(prompt) else prompt_text(self.tokenizer, prompt)
            for prompt in prompts
        ]
        responses = response_texts(self.tokenizer, rollout)
        scores = self.reward_model.score_texts(readable, responses, self.batch_size)
        return scores.to(rollout.logprobs)

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether the reward model has the policy's vocabulary. It still reads chats as text."""
        # Cached, because this compares two full vocabularies.
        return self.reward_model.reads_tokens_of(self.tokenizer)


@dataclass(frozen=True)
class EnsembleReward:
    """Scores rollouts with the mean of several reward models."""

    members: Sequence[ModelReward]

    def __call__(
        self, prompts: Sequence[Prompt], rollout: Rollout, columns: Columns = NO_COLUMNS
    ) -> Tensor:
        """Return the mean scores (B,) of the members."""
        return self.scores_of_members(prompts, rollout).mean(dim=0)

    def scores_of_members(self, prompts: Sequence[Prompt], rollout: Rollout) -> Tensor:
        """Return the scores (M, B) of M members."""
        return torch.stack([member(prompts, rollout) for member in self.members])


def score_tokens(
    reward_model: RewardModel, rollout: Rollout, batch_size: int, *, equal_passes: bool = False
) -> Tensor:
    """Return scores (B,) of the sampled tokens; the reward model must have the policy's vocabulary.

    The stop token is removed. With `end_of_text`, the reward model's eos token is appended.
    """
    scores = torch.empty(len(rollout), device=rollout.logprobs.device)
    batches = scoring_batches(rollout.row_lengths, batch_size, equal_passes=equal_passes)
    for batch in each_pass(batches, "scoring"):
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
class ModuleReward:
    """Scores the sampled tokens with a script's own module."""

    name: str
    module: nn.Module
    batch_size: int

    def __call__(
        self, prompts: Sequence[Prompt], rollout: Rollout, columns: Columns = NO_COLUMNS
    ) -> Tensor:
        """Return scores (B,) of prompts with their responses, which include the stop token.

        Raises:
            ModelError: the module raises an error, or returns another shape than (B,) or (B, 1).
        """
        scores = torch.empty(len(rollout), device=rollout.logprobs.device)
        # Disable autocast, because the module chooses its own precision.
        autocast = torch.autocast(rollout.logprobs.device.type, enabled=False)
        with user_code_errors(ModelError, f"The reward model {self.name}"), autocast:
            for batch in token_batches(rollout.row_lengths, self.batch_size):
                rows = rollout.token_rows(batch)
                scores[batch] = score_rows(self.module, rows.ids, rows.lengths)
        return scores


@dataclass(frozen=True)
class FunctionReward:
    """Scores rollouts with a function."""

    name: str
    function: RewardFunction
    tokenizer: PreTrainedTokenizerBase

    @cached_property
    def asked(self) -> AskedColumns:
        """The columns that the function takes."""
        return asked_columns(self.name, self.function)

    def __call__(
        self, prompts: Sequence[Prompt], rollout: Rollout, columns: Columns = NO_COLUMNS
    ) -> Tensor:
        """Call the function with prompts and responses as texts, and columns; return scores (B,).

        Raises:
            ModelError: the function raises an error, or does not return one number for each
                response.
        """
        responses = response_texts(self.tokenizer, rollout)
        # Disable autocast, because the function chooses its own precision.
        with torch.autocast(rollout.logprobs.device.type, enabled=False):
            return self.score_texts(prompts, responses, columns).to(rollout.logprobs)

    def score_texts(
        self, prompts: Sequence[Prompt], responses: list[str], columns: Columns
    ) -> Tensor:
        """Return scores (B,) of prompts with their responses.

        Raises:
            ModelError: see `__call__`.
        """
        texts = [prompt_text(self.tokenizer, prompt) for prompt in prompts]
        with user_code_errors(ModelError, f"The reward function {self.name}"):
            given = self.function(texts, responses, **self.asked.select(columns))
        try:
            scores = torch.as_tensor(given, dtype=torch.float32)
        # RuntimeError and OverflowError: a number is too large for a float, or text is in a list.
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ModelError(
                f"The reward function {self.name} returned {given!r:.80}, which is not a sequence "
                f"of numbers: {error}. Return one float for each response."
            ) from error
        if scores.shape != (len(responses),):
            raise ModelError(
                f"The reward function {self.name} returned numbers of shape {tuple(scores.shape)} "
                f"for {len(responses)} responses. Return one float for each response."
            )
        # The function may have computed with gradients, which the loss must not use.
        return scores.detach()


class RewardMix:
    """The weighted sum of several rewards."""

    def __init__(
        self, sources: Mapping[str, RewardSource], weights: Sequence[float] | None
    ) -> None:
        """Combine named rewards, weighted by `weights`; if None, all weights are 1.

        A reward with weight 0 is computed and logged, but adds nothing to the sum.

        Raises:
            ConfigError: the numbers of rewards and weights differ, or a reward has the name of a
                metric, see `disagreement_names`.
        """
        self.sources = dict(sources)
        self.weights = [1.0] * len(sources) if weights is None else list(weights)
        if len(self.weights) != len(self.sources):
            raise ConfigError(
                f"reward_weights={self.weights} has {len(self.weights)} numbers for "
                f"{len(self.sources)} rewards ({', '.join(self.sources)}). Set reward_weights to "
                "one number for each reward."
            )
        means = [name for name, one in self.sources.items() if isinstance(one, EnsembleReward)]
        self._disagreement = disagreement_names(self.sources, means)

    def __call__(
        self, prompts: Sequence[Prompt], rollout: Rollout, columns: Columns = NO_COLUMNS
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum (B,), and the unweighted scores (B,) by name of the reward.

        If a reward is the mean of several models, a further entry has the standard deviation (B,)
        of the models' scores for each response; for its name see `disagreement_names`.
        """
        parts: dict[str, Tensor] = {}
        for name, source in self.sources.items():
            if isinstance(source, EnsembleReward):
                each = source.scores_of_members(prompts, rollout)
                parts[name], parts[self._disagreement[name]] = each.mean(dim=0), each.std(dim=0)
            else:
                parts[name] = source(prompts, rollout, columns)
        return self.total(parts), parts

    def total(
        self, parts: Mapping[str, Tensor], moments: Mapping[str, RunningMoments] | None = None
    ) -> Tensor:
        """Return the weighted sum (B,) of `parts`, which are scores (B,) by name of the reward.

        With `moments`, first divide each reward's scores by their running standard deviation.
        """
        deviations = {name: one.std for name, one in (moments or {}).items()}
        weighted = [
            weight * scores / deviations.get(name, 1.0)
            for name, weight, scores in self._weighted(parts)
        ]
        return torch.stack(weighted).sum(dim=0)

    def scaled(self, scores: Scores, moments: dict[str, RunningMoments]) -> Scores:
        """Update `moments`; return `scores` with the weighted sum of the scaled rewards.

        `scores` must be of the full batch, so that the moments are equal in all processes.
        """
        for name, _, values in self._weighted(scores.parts):
            moments.setdefault(name, RunningMoments()).update(values)
        return replace(scores, scores=self.total(scores.parts, moments))

    def _weighted(self, parts: Mapping[str, Tensor]) -> list[tuple[str, float, Tensor]]:
        """Return name, weight and scores of each reward whose weight is not 0.

        A reward with weight 0 may be infinite or NaN, and its product with 0 would be NaN.
        """
        named = zip(self.sources, self.weights, strict=True)
        return [(name, weight, parts[name]) for name, weight in named if weight]

    def asked_columns(self) -> list[AskedColumns]:
        """Return the columns that reward functions take."""
        kept = self.sources.values()
        asked = [source.asked for source in kept if isinstance(source, FunctionReward)]
        return [one for one in asked if not one.is_empty]

    def weighted(self) -> "RewardMix":
        """Return a mix without the rewards of weight 0, which are only logged."""
        named = zip(self.sources.items(), self.weights, strict=True)
        kept = [(name, source, weight) for (name, source), weight in named if weight]
        return RewardMix({name: one for name, one, _ in kept}, [weight for *_, weight in kept])

    @property
    def scores_tokens(self) -> bool:
        """Whether all rewards are reward models with the policy's vocabulary."""
        return all(_scores_tokens(source) for source in self.sources.values())

    def models(self, *, weighted: bool = False) -> list[RewardModel]:
        """Return all reward models among the rewards, including each member of an ensemble.

        If `weighted`, leave out those of rewards with weight 0.
        """
        named = zip(self.sources.values(), self.weights, strict=True)
        return [
            model for one, weight in named if weight or not weighted for model in _models_of(one)
        ]

    def move_adapter_heads(self, device: torch.device) -> None:
        """Move the heads of reward models that are adapters on the policy's base to a device."""
        for scorer in self.models():
            if isinstance(scorer.model, AdapterClassifier):
                scorer.model.eval().to(device)

    def modules(self) -> list[nn.Module]:
        """Return the rewards that are a script's own modules."""
        kept = self.sources.values()
        return [source.module for source in kept if isinstance(source, ModuleReward)]


def make_rewards(
    given: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    weights: Sequence[float] | None = None,
    equal_passes: bool = False,
) -> RewardMix:
    """Make the rewards of a run from one reward, a list of rewards, or a dict of rewards by name.

    A reward is a `RewardModel`, a `...ForSequenceClassification`, another module that reads the
    policy's tokens (`ppo_core.models.script_modules`), or a function of prompts and responses. A
    PeftModel is replaced by a copy with the adapter merged. For `equal_passes` see
    `Engine.requires_equal_passes`.

    Raises:
        ModelError: a reward is none of these.
        ConfigError: there is no reward, two rewards have the same name, a reward has the name of
            a metric, or the number of weights differs from the number of rewards.
    """
    if isinstance(given, Mapping):
        named = dict(given)
    else:
        several = list(given) if isinstance(given, list | tuple) else [given]
        names = [_name_of(reward) for reward in several]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ConfigError(
                f"Several rewards have the name {twice[0]!r}, so their metrics would overwrite "
                "each other. Pass the rewards as a dict with different names."
            )
        named = dict(zip(names, several, strict=True))
    if not named:
        raise ConfigError("There is no reward, so nothing would be learned. Pass a reward.")
    return RewardMix(
        {
            name: _make_source(name, one, tokenizer, batch_size, equal_passes=equal_passes)
            for name, one in named.items()
        },
        weights,
    )


def _scores_tokens(source: RewardSource) -> bool:
    members = source.members if isinstance(source, EnsembleReward) else [source]
    return all(isinstance(one, ModelReward) and one.reads_tokens for one in members)


def _models_of(source: RewardSource) -> list[RewardModel]:
    members = source.members if isinstance(source, EnsembleReward) else [source]
    return [one.reward_model for one in members if isinstance(one, ModelReward)]


def _name_of(reward: Any) -> str:
    model = reward.model if isinstance(reward, RewardModel) else reward
    if isinstance(model, nn.Module):
        return type(model).__name__
    return str(getattr(model, "__name__", type(model).__name__))


def _make_source(
    name: str,
    reward: Any,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
    *,
    equal_passes: bool,
) -> RewardSource:
    if is_peft(reward):
        reward = merged_copy(reward)
    is_model = isinstance(reward, PreTrainedModel | AdapterClassifier)
    if isinstance(reward, nn.Module) and (not is_model or has_own_score(reward)):
        return ModuleReward(name, reward, batch_size)
    if isinstance(reward, nn.Module):
        if not hasattr(getattr(reward, "config", None), "num_labels") or not hasattr(
            reward, "score"
        ):
            raise ModelError(
                f"The reward {name} is a {type(reward).__name__}, which has no classification "
                "head. Use a ...ForSequenceClassification with num_labels=1, "
                "ppo_core.load_reward_model(path), or a function of prompts and responses."
            )
        has_end = tokenizer.eos_token_id is not None
        reward = RewardModel(reward, tokenizer, end_of_text=has_end)  # type: ignore[arg-type]
    if isinstance(reward, RewardModel):
        members = [ModelReward(one, tokenizer, batch_size, equal_passes) for one in reward.members]
        return members[0] if len(members) == 1 else EnsembleReward(members)
    if callable(reward):
        return FunctionReward(name, reward, tokenizer)
    raise ModelError(
        f"The reward {name} is {reward!r:.80}. Pass a model or a function of prompts and responses."
    )
