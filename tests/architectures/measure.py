"""Train a small model of a type for two updates, and compare its log-probabilities."""

import copy
import logging
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.types import Rollout
from ppo_core.errors import ModelError
from ppo_core.ppo.logprobs_and_values import response_logprobs
from ppo_core.rollout.sample_responses import sample_responses
from ppo_core.rollout.token_sampling import SamplingSettings
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.architectures.zoo import small_model
from tests.helpers.models.tiny import EOS, make_prompts, make_tokenizer

LIMIT = 1e-5
"""Largest difference of an exact log-probability."""

LENGTHS = [3, 11, 6, 11, 6, 3]
RESPONSE_LENGTH = 10


OUTCOMES = ("exact", "refused", "wrong", "crash", "not built")


@dataclass(frozen=True)
class Result:
    """What became of one model type."""

    name: str
    outcome: str
    """One of `OUTCOMES`."""

    difference: float | None = None
    """Largest difference of log-probabilities, before and after two updates."""

    detail: str = ""
    """The backend that decodes the type, or the reason why it is not trained."""


def measure(name: str) -> Result:
    """Return whether a model type trains exactly, or what keeps it from training."""
    try:
        model = small_model(name)
    except Exception as error:  # a field that the small configuration lacks, or a missing library
        return Result(name, "not built", detail=f"{type(error).__name__}: {error}")
    try:
        return _trained(name, model)
    except ModelError as error:
        return Result(name, "refused", detail=str(error))
    except Exception as error:  # whatever it is: it goes into the table
        logging.exception(name)
        return Result(name, "crash", detail=f"{type(error).__name__}: {error}")


def _trained(name: str, model: PreTrainedModel) -> Result:
    trainer = _trainer(model)
    before = _difference(trainer)
    trainer.train()
    after = _difference(trainer)
    worst = max(before, after)
    decoding = trainer.self_check.decoding
    assert decoding is not None
    return Result(name, "exact" if worst <= LIMIT else "wrong", worst, decoding.kind.value)


def _trainer(model: PreTrainedModel) -> PPOTrainer:
    config = PPOConfig(
        total_episodes=12,
        batch_size=6,
        num_ppo_epochs=1,
        num_mini_batches=1,
        per_device_train_batch_size=4,
        local_rollout_forward_batch_size=4,
        response_length=RESPONSE_LENGTH,
        learning_rate=1e-3,
        stop_token_id=EOS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        num_sample_generations=0,
        output_dir=tempfile.mkdtemp(),
    )
    rows = [{"input_ids": tokens} for tokens in make_prompts(LENGTHS)]
    return PPOTrainer(config, make_tokenizer(), model, None, _score, rows)


def _score(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(set(response.split()))) for response in responses]


@torch.no_grad()
def _difference(trainer: PPOTrainer) -> float:
    """Return the largest difference to a forward of each row alone, of sampling and scoring."""
    uniforms = torch.rand(len(LENGTHS), RESPONSE_LENGTH, generator=torch.Generator().manual_seed(1))
    rollout = sample_responses(
        trainer.policy,
        make_prompts(LENGTHS),
        uniforms,
        SamplingSettings(stop_token_id=EOS, temperature=0.7),
        batch_size=4,
    )
    scored = response_logprobs(trainer.policy, rollout, 4)

    def furthest(model: PreTrainedModel) -> float:
        expected = _alone(model, rollout)
        return max((each - expected).abs().max().item() for each in (rollout.logprobs, scored))

    difference = furthest(trainer.policy.model)
    if difference <= LIMIT:
        return difference
    # Part of it may be rounding of the reference, which double precision does not have. Not all
    # model types compute in double precision.
    return furthest(copy.deepcopy(trainer.policy.model).double())


def _alone(model: Any, rollout: Rollout) -> Tensor:
    """Return log-probabilities (B, T) by the model's own forward of each row alone."""
    expected = torch.zeros_like(rollout.logprobs, dtype=torch.float64)
    for b in range(len(rollout)):
        start, length = int(rollout.prompt_lengths[b]), int(rollout.response_lengths[b])
        prompt, response = rollout.prompt_ids[b, :start], rollout.response_ids[b, :length]
        ids = torch.cat([prompt, response])[None]
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        logits = output.logits[0, start - 1 : -1].double() / rollout.temperature
        logprobs = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        expected[b, :length] = logprobs
    return expected
