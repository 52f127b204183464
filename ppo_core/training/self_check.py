"""Compare the outputs of a run's models with the models' own forward pass of single sequences."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_core.data.batching import pad_rows
from ppo_core.data.prompts import Tokens
from ppo_core.data.text_config import text_config
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ModelError
from ppo_core.models.actor_critic import Critic
from ppo_core.models.backbones import DecoderBackbone, Decoding
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.model_bundle import ModelBundle
from ppo_core.ppo.ptx import joined_texts
from ppo_core.rollout.decoding_check import (
    CHECKED_LENGTHS,
    DecodingCheck,
    OwnForward,
    choose_backend,
    difference_of,
    limit_of,
    own_logprobs,
    sequences_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SelfCheck:
    """The result of `check_numbers`, or of `check_loaded`."""

    decoding: DecodingCheck | None
    """The backend that decodes the policy; None if a server samples."""

    padded: dict[str, float]
    """Model -> difference between its padded pass and its forward pass of each sequence alone."""

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

    Scoring and the update make the same padded pass. The compared sequences have different lengths
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
        # A script's own module has no other forward pass to compare with.
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
    # The model is causal, so the beginning of a sequence needs no second pass.
    beginning = min(CHECKED_LENGTHS)
    sequences, expected = [tokens, tokens[:beginning]], [logprobs[:-1], logprobs[: beginning - 1]]
    return _check_language_model("reference", reference, sequences, expected)


def _check_language_model(
    name: str, model: LanguageModel, sequences: Sequence[Tokens], expected: Sequence[Tensor]
) -> float:
    """Return the difference between a padded pass and `expected`, (S - 1, V) for each sequence."""
    rows = joined_texts(sequences).to(model.device)
    own = torch.cat(list(expected)).gather(1, rows.targets[:, None])[:, 0]

    def difference() -> float:
        return difference_of(model.model, model(rows, 1.0)[0] - own)

    return _check_padding(f"{name}'s log-probabilities", model.model, model.backbone, difference)


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
        return difference_of(critic.model, _relative(given, own))

    return _check_padding("critic's values", critic.model, backbone, difference)


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
        return difference_of(scorer.model, _relative(scores, alone))

    backbone = scorer.backbone if scorer.lm_head is not None else None
    return _check_padding("reward model's scores", scorer.model, backbone, difference)


def _own_score(scorer: RewardModel, ids: Tensor) -> Tensor:
    """Return the model's own output (1,) for one sequence (1, S)."""
    if isinstance(scorer.model, PreTrainedModel):
        return scorer.model(input_ids=ids).logits[:, 0].float()
    assert scorer.lm_head is not None
    return scorer.lm_head(scorer.backbone.hidden_states(ids)[:, -1])[:, 0].float()


def _relative(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the differences, divided by the largest absolute `expected` number if it exceeds 1."""
    return ((actual - expected).float() / expected.float().abs().max().clamp(min=1)).flatten()


def _check_padding(
    numbers: str,
    model: nn.Module,
    backbone: object,
    difference: Callable[[], float],
) -> float:
    """Return the difference of a padded pass, made in the first way that is accurate enough.

    The backbone keeps this way.

    Raises:
        ModelError: the difference is too large in every way, even with a mask.
    """
    limit, found = limit_of(model), []
    for _ in _ways(backbone):
        found.append(difference())
        if found[-1] <= limit:
            return found[-1]
    config: Any = model.config
    raise ModelError(
        f"The {numbers} would be wrong: in a padded batch, {type(model).__name__} (model type "
        f"{config.model_type}) gives numbers that differ by {min(found):.2g} from those of each "
        f"sequence alone. Allowed is {limit:.0e}. Use another model."
    )


def _ways(backbone: object) -> Iterator[None]:
    """Set a backbone to each way of making a padded pass in turn, the fastest first."""
    yield
    if isinstance(backbone, DecoderBackbone):
        if backbone.fastest is Decoding.FAST:
            backbone.fastest = Decoding.PADDED
        yield
        backbone.passes_mask = True
        yield
