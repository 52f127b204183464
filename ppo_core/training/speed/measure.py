"""Time passes of a policy with few layers, with the processes and the sharding of a training.

All processes work at the same time, as they will in the training, so they share the machine's
memory and processors. The weights are random, because their values do not affect the times.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PretrainedConfig, PreTrainedModel

from ppo_core.data.text_config import text_config
from ppo_core.data.types import Rollout
from ppo_core.distributed.choose_engine import choose_engine
from ppo_core.distributed.engine import Engine
from ppo_core.models.critic import ActorCritic, Critic
from ppo_core.models.loading import load_config, reading, text_class
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.logprobs_and_values import response_logprobs
from ppo_core.rollout.sample_responses import sample_responses
from ppo_core.rollout.token_sampling import NO_STOP_TOKEN, SamplingSettings
from ppo_core.training.speed.job import FoundSpeed, PassSeconds, SpeedJob

MAX_DRAWN = 16
"""Maximum number of tokens, after the first, that the measurement draws for a response."""

REPEATS = 5
"""Number of measurements of each pass, after a warmup; the result is their median."""

ENOUGH_SECONDS = 5.0
"""Total seconds after which a pass is not measured again: the times of long passes vary little."""

PASSES = 4
"""Number of passes that are measured for each model, not counting exchanges between processes."""

MAX_GRAD_NORM = 1.0
"""Norm to which gradients are clipped. The learning rate is 0, so any value works."""


def measure(job: SpeedJob, note: Callable[[int, int], None]) -> FoundSpeed:
    """Time the passes of a job. Every process must call this function.

    Args:
        job: the job.
        note: called after each pass, with the number of passes so far and the total number.

    Raises:
        ConfigError: see `Engine`.
        ModelError: the policy's configuration cannot be read, or transformers has no such model.
    """
    engine = choose_engine(bf16=job.autocast, use_cpu=job.use_cpu, sharding=job.sharding)
    works = (1 + len(job.depths) * (PASSES + _exchanges(engine))) * (1 + REPEATS)
    done = 0

    def note_more(passes: int) -> None:
        nonlocal done
        done += passes
        note(done, works)

    clock = _Clock(engine, note_more)
    adam = _adam_seconds(clock)
    passes = [
        _passes(_random_policy(job.policy, layers), job, clock, adam) for layers in job.depths
    ]
    return FoundSpeed(passes=passes, adam=adam)


def _with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a copy of a configuration with this number of layers, repeating the layer types."""
    config = copy.deepcopy(config)
    text = text_config(config)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        kinds = text.layer_types
        text.layer_types = [kinds[number % len(kinds)] for number in range(layers)]
    return config


def _random_policy(path: str, layers: int) -> PreTrainedModel:
    """Return a policy with random weights in fp32, the precision of weights in a training."""
    config = load_config(path)
    with reading("model", path):
        model: PreTrainedModel = text_class(config).from_config(
            _with_layers(config, layers), dtype=torch.float32, trust_remote_code=False
        )
    return model.eval()


@dataclass(frozen=True)
class _Clock:
    """Times work that all processes begin together."""

    engine: Engine

    note: Callable[[int], None]
    """Called with the number of passes that were done or left out."""

    def seconds(
        self,
        work: Callable[[], object],
        *,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> float:
        """Return the slowest process's median seconds of `work`, without `before` and `after`."""
        measured: list[float] = []
        while len(measured) <= REPEATS:
            before()
            self.engine.any(False)  # A barrier.
            started = time.perf_counter()
            work()
            if self.engine.device.type == "cuda":
                torch.cuda.synchronize()
            measured.append(time.perf_counter() - started)
            after()
            self.note(1)
            if len(measured) > 1 and self.engine.any(sum(measured) > ENOUGH_SECONDS):
                break
        self.note(1 + REPEATS - len(measured))
        return max(self.engine.peers.exchange(median(measured[1:])))


def _passes(model: PreTrainedModel, job: SpeedJob, clock: _Clock, adam: float) -> PassSeconds:
    """Return the times of a policy; `adam` is the seconds per parameter of an optimizer step."""
    engine = clock.engine
    model.to(engine.device)  # type: ignore[arg-type]
    if engine.shards_weights:
        # Sharded weights have forward hooks, and a model with hooks has no fast path. An empty hook
        # has the same effect.
        model.base_model.register_forward_pre_hook(lambda *_: None)
    policy = LanguageModel(model)
    rollout = _rollout(job.trained_rows, job.prompt_tokens, job.response_tokens, engine)
    tokens, drawn = int(rollout.row_lengths.sum()), min(job.response_tokens, MAX_DRAWN)
    with engine.autocast():
        first, last = (
            clock.seconds(partial(_draw, policy, job, length)) for length in (1, 1 + drawn)
        )
        scoring = clock.seconds(partial(response_logprobs, policy, rollout, job.trained_rows))
    trained = ActorCritic(policy, Critic.on_policy(policy))
    # Not `engine.backward`: the engine may still hold the model of the previous depth.
    updating = clock.seconds(lambda: _loss(trained, policy, rollout, engine).backward())
    gathering, exchange = _exchange(trained, clock, adam)
    return PassSeconds(
        layers=text_config(model.config).num_hidden_layers,
        scoring=scoring / tokens,
        updating=updating / tokens,
        drawing=max(last - first, 0.0) / drawn,
        gathering=gathering,
        exchange=exchange,
    )


def _draw(policy: LanguageModel, job: SpeedJob, length: int) -> None:
    """Sample responses of exactly `length` tokens."""
    prompts = [[0] * job.prompt_tokens] * job.sampled_rows
    uniforms = torch.full((len(prompts), length), 0.5)
    settings = SamplingSettings(stop_token_id=NO_STOP_TOKEN, temperature=1.0)
    sample_responses(policy, prompts, uniforms, settings, batch_size=len(prompts))


def _rollout(rows: int, prompt_tokens: int, response_tokens: int, engine: Engine) -> Rollout:
    """Return a rollout with exactly the given numbers of tokens; all token ids are 0."""

    def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=engine.device)

    return Rollout(
        prompt_ids=zeros(rows, prompt_tokens),
        prompt_lengths=zeros(rows) + prompt_tokens,
        response_ids=zeros(rows, response_tokens),
        response_lengths=zeros(rows) + response_tokens,
        has_stop=zeros(rows, dtype=torch.bool),
        logprobs=zeros(rows, response_tokens, dtype=torch.float32),
        temperature=1.0,
        response_mask=~zeros(rows, response_tokens, dtype=torch.bool),
    )


def _loss(module: nn.Module, policy: LanguageModel, rollout: Rollout, engine: Engine) -> Tensor:
    """Return the loss of a batch; `module` is an ActorCritic, or what the engine made from it."""
    rows = rollout.token_rows(torch.arange(len(rollout), device=engine.device))
    with engine.autocast(), policy.backbone.products(rows.ids):
        predicted, values = module(rows, 1.0, lambda logprobs, part: logprobs)
    loss: Tensor = predicted.loss + values.sum()
    return loss


def _exchanges(engine: Engine) -> int:
    # The number of passes that `_exchange` measures.
    if engine.num_processes == 1:
        return 0
    return 3 if engine.shards_weights or engine.is_deepspeed else 2


def _exchange(trained: ActorCritic, clock: _Clock, adam: float) -> tuple[float, float]:
    """Return the seconds of `PassSeconds.gathering` and `PassSeconds.exchange`.

    In a pass of two tokens, the exchange takes almost all of the time. The same pass without the
    engine exchanges nothing, and its time is subtracted.
    """
    engine = clock.engine
    if engine.num_processes == 1:
        return 0.0, 0.0
    policy, shortest = trained.policy, _rollout(1, 1, 1, engine)
    parameters = sum(parameter.numel() for parameter in trained.parameters())
    optimizer: Optimizer = torch.optim.AdamW(trained.parameters(), lr=0.0)
    optimizer.zero_grad()
    alone = clock.seconds(
        lambda: _loss(trained, policy, shortest, engine).backward(), after=optimizer.zero_grad
    )
    module, optimizer = engine.prepare(trained, optimizer)

    def pass_and_reduce() -> None:
        with engine.accumulate_only(module, False):
            engine.backward(_loss(module, policy, shortest, engine))

    def step() -> None:
        engine.step(module, optimizer, MAX_GRAD_NORM)

    def gather() -> None:
        with engine.gathered(module):
            pass

    together = clock.seconds(pass_and_reduce, after=step)
    gathering = 0.0
    if engine.shards_weights:
        gathering = clock.seconds(gather)
    elif engine.is_deepspeed:
        # Each process updates its share of the weights, and the step sends the new weights.
        stepping = clock.seconds(step, before=pass_and_reduce)
        gathering = max(stepping - adam * parameters / engine.num_processes, 0.0)
    return gathering, max(together - alone, 0.0)


def _adam_seconds(clock: _Clock) -> float:
    """Return the seconds of an optimizer step, divided by the number of parameters."""
    parameters = nn.Parameter(torch.zeros(2**22, device=clock.engine.device))
    parameters.grad = torch.zeros_like(parameters)
    optimizer = torch.optim.AdamW([parameters], fused=True)
    return clock.seconds(optimizer.step) / parameters.numel()
