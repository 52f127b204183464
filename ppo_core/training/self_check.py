"""Compare decoding and padded passes of a run's models with passes of single sequences."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_core.data.batching import pad_rows
from ppo_core.data.prompts import Tokens
from ppo_core.data.text_config import text_config
from ppo_core.distributed.engine import Engine
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.critic import Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.model_bundle import ModelBundle
from ppo_core.ppo.ptx import joined_texts
from ppo_core.rollout.decoding_check import (
    CHECKED_LENGTHS,
    DecodingCheck,
    OwnForward,
    check_padding,
    choose_backend,
    difference_of,
    own_logprobs,
    relative,
    sequences_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SelfCheck:
    """The result of `check_numbers`, or of `check_loaded`."""

    decoding: DecodingCheck | None
    """The backend with which the policy decodes; None if a server samples."""

    padded: dict[str, float]
    """Model -> difference between its padded pass and its passes of each sequence alone."""

    def as_record(self) -> dict[str, str | float]:
        """Return the result as text and numbers, for a file."""
        record: dict[str, str | float] = {f"{name}_padded": d for name, d in self.padded.items()}
        if self.decoding is not None:
            record |= {"backend": self.decoding.kind.value, "decoded": self.decoding.difference}
        return record


@torch.no_grad()
def check_numbers(
    models: ModelBundle, prompts: Sequence[Tokens], engine: Engine, *, samples_here: bool
) -> SelfCheck:
    """Choose how the policy decodes, and compare each model's padded pass with single sequences.

    Scoring and the update make such padded passes. The compared sequences have different lengths
    and consist of tokens from the prompts. `samples_here` is False if a server samples the
    responses; no backend is then chosen. Call this function before the engine prepares policy and
    critic.

    Raises:
        ModelError: a model computes other numbers for a padded batch than for each sequence alone,
            or the policy cannot be sampled from.
    """
    with torch.autocast(engine.device.type, enabled=False):
        decoding, difference = _check_policy(models.policy, prompts, samples_here=samples_here)
        padded = {"policy": difference}
        with engine.gathered(models.reference):
            padded["reference"] = _check_reference(models.reference, prompts)
        # A script's own module has only one forward pass, so there is nothing to compare.
        if models.critic is not None and isinstance(models.critic.backbone, DecoderBackbone):
            padded["critic"] = _check_critic(models.critic, prompts)
        for number, scorer in enumerate(models.rewards.models(), start=1):
            held = [scorer.model] if isinstance(scorer.model, PreTrainedModel) else []
            with engine.all_gathered(held):
                padded[f"reward_model_{number}"] = _check_reward_model(scorer, prompts)
    listed = ", ".join(f"{name} {difference:.1e}" for name, difference in padded.items())
    logger.info("Differences of padded passes to each sequence alone: %s.", listed)
    return SelfCheck(decoding, padded)


@torch.no_grad()
def check_loaded(
    policy: LanguageModel,
    reward_model: RewardModel | None,
    prompts: Sequence[Tokens],
    *,
    samples_here: bool,
) -> SelfCheck:
    """Check the models that a run will start from, as `check_numbers` does.

    Raises:
        ModelError: see `check_numbers`.
    """
    decoding, difference = _check_policy(policy, prompts, samples_here=samples_here)
    padded = {"policy": difference}
    if reward_model is not None:
        padded["reward_model"] = _check_reward_model(reward_model, prompts)
    return SelfCheck(decoding, padded)


def _check_policy(
    policy: LanguageModel, prompts: Sequence[Tokens], *, samples_here: bool
) -> tuple[DecodingCheck | None, float]:
    own = OwnForward.of(policy, prompts)
    decoding = choose_backend(policy, own) if samples_here else None
    expected = [logprobs[:-1] for logprobs in own.logprobs]
    return decoding, _check_language_model("policy", policy, own.sequences, expected)


def _check_reference(reference: LanguageModel, prompts: Sequence[Tokens]) -> float:
    _, tokens, _ = sequences_of(prompts, reference.model.config)
    logprobs = own_logprobs(reference, tokens)
    # The model is causal, so this pass also gives the log-probabilities of a shorter sequence.
    beginning = min(CHECKED_LENGTHS)
    sequences, expected = [tokens, tokens[:beginning]], [logprobs[:-1], logprobs[: beginning - 1]]
    return _check_language_model("reference", reference, sequences, expected)


def _check_language_model(
    name: str, model: LanguageModel, sequences: Sequence[Tokens], expected: Sequence[Tensor]
) -> float:
    """Return how much a padded pass differs from `expected` log-probabilities, each (S - 1, V)."""
    rows = joined_texts(sequences).to(model.device)
    own = torch.cat(list(expected)).gather(1, rows.targets[:, None])[:, 0]

    def difference() -> float:
        return difference_of(model.model, model(rows, 1.0)[0] - own)

    return check_padding(f"{name}'s log-probabilities", model.model, model.backbone, difference)


def _check_critic(critic: Critic, prompts: Sequence[Tokens]) -> float:
    device = next(critic.head.parameters()).device
    backbone, config = critic.backbone, critic.model.config
    assert isinstance(backbone, DecoderBackbone)
    sequences = sequences_of(prompts, config)[:2]
    rows = joined_texts(sequences).to(device)
    alone = [
        backbone.hidden_states(torch.tensor([tokens], device=device))[0, :-1]
        for tokens in sequences
    ]
    states = torch.cat(alone)
    values = critic.values(states)
    # The values of a new critic are all 0, so compare its hidden states instead.
    is_new = not bool(values.any())

    def difference() -> float:
        given, own = (backbone.states(rows), states) if is_new else (critic(rows), values)
        return difference_of(critic.model, relative(given, own))

    return check_padding("critic's values", critic.model, backbone, difference)


def _check_reward_model(scorer: RewardModel, prompts: Sequence[Tokens]) -> float:
    config = text_config(scorer.model.config)
    # The model's own forward would treat trailing tokens that equal the pad token as padding.
    kept = [[token for token in tokens if token != config.pad_token_id] for tokens in prompts[:64]]
    sequences = sequences_of(kept, config, vocabulary=config.vocab_size)[:2]
    device = next(scorer.model.parameters()).device
    ids, lengths = (tensor.to(device) for tensor in pad_rows(sequences))
    rows = zip(ids, lengths.tolist(), strict=True)
    alone = torch.cat([_own_score(scorer, row[None, :length]) for row, length in rows])

    def difference() -> float:
        scores = scorer.score_rows(ids, lengths) / scorer.gain + scorer.bias
        return difference_of(scorer.model, relative(scores, alone))

    backbone = scorer.backbone if scorer.lm_head is not None else None
    return check_padding("reward model's scores", scorer.model, backbone, difference)


def _own_score(scorer: RewardModel, ids: Tensor) -> Tensor:
    """Return the model's own output (1,) for one sequence (1, S)."""
    if isinstance(scorer.model, PreTrainedModel):
        return scorer.model(input_ids=ids).logits[:, 0].float()
    assert scorer.lm_head is not None
    return scorer.lm_head(scorer.backbone.hidden_states(ids)[:, -1])[:, 0].float()
