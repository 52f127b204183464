"""Time passes of a policy with few layers, in the processes and the sharding of a training.

All processes work at the same time, as they will in the training, so they share the machine's
memory and processors. Weights are random: they change no time.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PretrainedConfig

from ppo_core.data.text_config import text_config
from ppo_core.data.types import Rollout
from ppo_core.distributed.engine import Engine
from ppo_core.models.actor_critic import ActorCritic, Critic
from ppo_core.models.loading import load_config
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.scoring import response_logprobs
from ppo_core.rollout.generate import sample_responses
from ppo_core.rollout.sampler import NO_STOP_TOKEN, SamplingSettings
from ppo_core.training.speed.job import FoundSpeed, PassSeconds, SpeedJob

MOST_DRAWN = 16
"""Tokens of a response that are drawn for the measurement."""

REPEATS = 5
"""Measurements of each pass, after one that is left out; the median counts."""


def measure(job: SpeedJob) -> FoundSpeed:
    """Return the seconds of the passes of a job; all of its processes must call.

    Raises:
        ConfigError: see `Engine`.
        ModelError: the policy's configuration cannot be read, or has no such model.
    """
    engine = Engine(bf16=job.autocast, use_cpu=job.use_cpu, sharding=job.sharding)
    clock = _Clock(engine)
    config = load_config(job.policy)
    passes = [_passes(with_layers(config, layers), job, engine, clock) for layers in job.depths]
    return FoundSpeed(passes=passes, adam=_adam_seconds(engine, clock))


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a copy of a model's configuration with so many layers, in the order of its kinds."""
    config = copy.deepcopy(config)
    text = text_config(config)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        kinds = text.layer_types
        text.layer_types = [kinds[number % len(kinds)] for number in range(layers)]
    return config


@dataclass(frozen=True)
class _Clock:
    """Times work that all processes begin together."""

    engine: Engine

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of the work in the slowest process."""
        measured = []
        for _ in range(1 + REPEATS):
            self.engine.any(False)  # Here the processes meet.
            started = time.perf_counter()
            work()
            if self.engine.device.type == "cuda":
                torch.cuda.synchronize()
            measured.append(time.perf_counter() - started)
        return max(self.engine.peers.exchange(median(measured[1:])))


def _passes(config: PretrainedConfig, job: SpeedJob, engine: Engine, clock: _Clock) -> PassSeconds:
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model = model.to(engine.device).eval()
    if engine.shards_weights:
        # As the hooks that gather weights, this leaves the passes to transformers.
        model.base_model.register_forward_pre_hook(lambda *_: None)
    policy = LanguageModel(model)
    with engine.autocast():
        prompts = [[0] * job.prompt_tokens]
        rollout = _draw(policy, prompts * job.trained_rows, job.response_tokens)
        drawn = min(job.response_tokens, MOST_DRAWN)
        first, last = (
            clock.seconds(partial(_draw, policy, prompts * job.sampled_rows, length))
            for length in (1, 1 + drawn)
        )
        scoring = clock.seconds(partial(response_logprobs, policy, rollout, job.trained_rows))
    trained = ActorCritic(policy, Critic.on_policy(policy))
    updating = clock.seconds(partial(_update, trained, rollout, engine))
    gathering, exchange = _exchange(trained, engine, clock)
    tokens = job.trained_rows * (job.prompt_tokens + job.response_tokens)
    return PassSeconds(
        layers=text_config(config).num_hidden_layers,
        scoring=scoring / tokens,
        updating=updating / tokens,
        drawing=max(last - first, 0.0) / drawn,
        gathering=gathering,
        exchange=exchange,
    )


def _draw(policy: LanguageModel, prompts: Sequence[list[int]], length: int) -> Rollout:
    """Return responses of exactly so many tokens."""
    uniforms = torch.full((len(prompts), length), 0.5)
    settings = SamplingSettings(stop_token_id=NO_STOP_TOKEN, temperature=1.0)
    return sample_responses(policy, prompts, uniforms, settings, batch_size=len(prompts))


def _update(trained: ActorCritic, rollout: Rollout, engine: Engine, prepared: Any = None) -> None:
    """Pass a batch forward and backward, through the prepared module if one is given."""
    module = trained if prepared is None else prepared
    rows = rollout.token_rows(torch.arange(len(rollout.logprobs), device=engine.device))
    with trained.policy.backbone.products(rows.ids):
        with engine.autocast():
            predicted, values = module(rows, 1.0, lambda logprobs, part: logprobs)
        engine.backward(predicted.loss + values.sum())


def _exchange(trained: ActorCritic, engine: Engine, clock: _Clock) -> tuple[float, float]:
    """Return the seconds of `PassSeconds.gathering` and `PassSeconds.exchange`.

    A pass of two tokens computes next to nothing beside what it exchanges. What it takes in a
    process alone is subtracted.
    """
    if engine.num_processes == 1:
        return 0.0, 0.0
    with engine.autocast():
        shortest = _draw(trained.policy, [[0]], 1)
    alone = clock.seconds(partial(_update, trained, shortest, engine))
    optimizer: Optimizer = torch.optim.AdamW(trained.parameters())
    optimizer.zero_grad()
    module, optimizer = engine.prepare(trained, optimizer)

    def pass_and_send() -> None:
        with engine.accumulate_only(module, False):
            _update(trained, shortest, engine, module)
        engine.discard(module, optimizer)

    def gather() -> None:
        with engine.gathered(module):
            pass

    together = clock.seconds(pass_and_send)
    gathering = clock.seconds(gather) if engine.shards_weights else 0.0
    return gathering, max(together - alone, 0.0)


def _adam_seconds(engine: Engine, clock: _Clock) -> float:
    """Return the seconds of an optimizer step per parameter."""
    parameters = torch.nn.Parameter(torch.zeros(2**22, device=engine.device))
    parameters.grad = torch.zeros_like(parameters)
    optimizer = torch.optim.AdamW([parameters], fused=True)
    return clock.seconds(optimizer.step) / parameters.numel()
