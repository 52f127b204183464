"""Speed of this machine on the policy of a run, measured on two models of few layers.

A pass takes a + b L seconds with L layers. Two depths give b, the time of a layer, and a, that of
everything outside the layers: embeddings, LM head, and drawing tokens.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from transformers import AutoModelForCausalLM

from pipeline.launch.commands import gpus, threads_of_a_process
from pipeline.preflight.sizes.run_time import Backward
from ppo_core.data.text_config import text_config
from ppo_core.data.types import Rollout
from ppo_core.models.loading import load_config
from ppo_core.models.policy import LanguageModel
from ppo_core.ppo.scoring import response_logprobs
from ppo_core.rollout.generate import sample_responses
from ppo_core.rollout.sampler import NO_STOP_TOKEN, SamplingSettings
from ppo_core.training.memory.ppo_memory import PPOSize
from ppo_core.training.memory.sizes import ModelSize

MOST_LAYERS = 3
"""Layers of the deeper of the two models that are measured; 2 if the policy has no more."""

MOST_PARAMETERS = 10**9
"""Parameters of a measured model, above which nothing is measured: it would take minutes."""

MOST_DRAWN = 16
"""Tokens of a response that are drawn for the measurement."""

REPEATS = 3
"""Measurements of each pass, after one that is left out; the fastest counts."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Seconds of a pass with L layers: outside + layer x L."""

    outside: float
    layer: float


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeed:
    """Speed of one process of this machine, for the batches of a run."""

    model: ModelSize
    """The policy, whose layers were measured."""

    scoring: Line
    """Per token of prompt and response, of a pass without gradients."""

    updating: Line
    """Per token of prompt and response, of a pass forward and backward."""

    drawing: Line
    """Of a token for each response of a batch."""

    answered: float
    """Fraction of the measured tokens whose logits were computed."""

    adam: float
    """Per parameter."""

    def forward(self, model: ModelSize, tokens: float, logit_tokens: float) -> float:
        """Return seconds of passes without gradients, with logits for some of the tokens."""
        return self._pass(self.scoring, model, tokens, logit_tokens)

    def training(
        self, model: ModelSize, tokens: float, logit_tokens: float, backward: Backward
    ) -> float:
        """Return seconds of passes forward and backward.

        Only passes with gradients of weights are measured, without `gradient_checkpointing`. The
        gradients of weights are half of the backward pass.
        """
        seconds = self._pass(self.updating, model, tokens, logit_tokens)
        if backward.is_frozen:
            seconds = (seconds + self._pass(self.scoring, model, tokens, logit_tokens)) / 2
        return seconds + (self.forward(model, tokens, 0) if backward.recomputes else 0.0)

    def decoding(self, model: ModelSize) -> float:
        """Return seconds in which each sequence of a batch grows by one token."""
        return self.drawing.outside + self.drawing.layer * self._layers(model)

    def optimizer(self, parameters: float) -> float:
        """Return seconds of an optimizer step on so many parameters."""
        return self.adam * parameters

    def _pass(self, line: Line, model: ModelSize, tokens: float, logit_tokens: float) -> float:
        outside = line.outside * logit_tokens / self.answered
        return outside + line.layer * self._layers(model) * tokens

    def _layers(self, model: ModelSize) -> float:
        """Return the number of the policy's layers that have as many weights as the model's."""
        return (model.parameters - model.outside_layers) / self.model.of_a_layer


def measure_speed(policy: str, size: PPOSize) -> MeasuredSpeed | None:
    """Return the speed of this machine on a policy; None if the policy is too large to measure.

    Args:
        policy: folder or hub id.
        size: sizes of the batches.
    """
    device = "cuda" if gpus() else "cpu"
    depths = 1, max(2, min(MOST_LAYERS, size.policy.layers))
    if size.policy.outside_layers + depths[1] * size.policy.of_a_layer > MOST_PARAMETERS:
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_of_a_process(size.processes_of_a_machine))
    try:
        with torch.random.fork_rng():
            few, more = (_measure_depth(policy, layers, size, device) for layers in depths)
            adam = _adam_seconds(device)
    finally:
        torch.set_num_threads(threads)
    scoring, updating, drawing = (_line(depths, pair) for pair in zip(few, more, strict=True))
    tokens = size.prompt_tokens + size.response_tokens
    return MeasuredSpeed(
        model=size.policy,
        scoring=scoring,
        updating=updating,
        drawing=drawing,
        answered=size.response_tokens / tokens,
        adam=adam,
    )


def _line(depths: tuple[int, int], seconds: tuple[float, float]) -> Line:
    """Return the line through the seconds of both depths; noise may not make it fall."""
    layer = max(seconds[1] - seconds[0], 0.0) / (depths[1] - depths[0])
    return Line(outside=max(seconds[0] - depths[0] * layer, 0.0), layer=layer)


def _measure_depth(
    policy: str, layers: int, size: PPOSize, device: str
) -> tuple[float, float, float]:
    """Return seconds per token of scoring and of updating, and per drawn token of a batch."""
    config = copy.deepcopy(load_config(policy))
    text = text_config(config)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        kinds = text.layer_types
        text.layer_types = [kinds[number % len(kinds)] for number in range(layers)]
    policy_model = AutoModelForCausalLM.from_config(config).to(device).eval()
    if size.shards_weights:
        # As the hooks that gather weights, this leaves the passes to transformers.
        policy_model.base_model.register_forward_pre_hook(lambda *_: None)
    model = LanguageModel(policy_model)
    autocast = torch.autocast(device, torch.bfloat16, enabled=size.autocast)
    drawn = min(size.response_tokens, MOST_DRAWN)

    def draw(rows: int, length: int) -> Rollout:
        prompts = [[0] * size.prompt_tokens] * rows
        numbers = torch.full((rows, length), 0.5)
        settings = SamplingSettings(stop_token_id=NO_STOP_TOKEN, temperature=1.0)
        return sample_responses(model, prompts, numbers, settings, batch_size=rows)

    def score() -> object:
        return response_logprobs(model, rollout, len(rollout.logprobs))

    def update() -> None:
        rows = rollout.token_rows(torch.arange(len(rollout.logprobs), device=device))
        with model.backbone.products(rows.ids):
            states = model.backbone.states(rows)
            predicted = model.predict(states, rows, 1.0, lambda logprobs, part: logprobs)
            predicted.loss.backward()

    with autocast:
        rollout = draw(size.trained_rows, size.response_tokens)
        first, last = (
            _seconds_of(partial(draw, size.sampled_rows, length), device)
            for length in (1, 1 + drawn)
        )
        tokens = rollout.response_mask.numel() + size.prompt_tokens * len(rollout.logprobs)
        scoring, updating = (_seconds_of(each, device) / tokens for each in (score, update))
    return scoring, updating, max(last - first, 0.0) / drawn


def _adam_seconds(device: str) -> float:
    """Return the seconds of an optimizer step per parameter."""
    parameters = torch.nn.Parameter(torch.zeros(2**22, device=device))
    parameters.grad = torch.zeros_like(parameters)
    optimizer = torch.optim.AdamW([parameters], fused=True)
    return _seconds_of(optimizer.step, device) / parameters.numel()


def _seconds_of(work: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest of some repetitions."""
    seconds = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
