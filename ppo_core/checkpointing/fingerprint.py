"""What makes a run the one that wrote a checkpoint: its settings, its prompts, its models."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.models.adapters import is_peft
from ppo_core.models.reward_model import RewardModel
from ppo_core.models.value_head import ModelWithValueHead
from ppo_core.ppo.schedule import Schedule

AROUND = re.compile(
    "output_dir|exp_name|run_name|report_to|disable_tqdm|dataset_num_proc|num_sample_generations|"
    "local_rollout_forward_batch_size|per_device_eval_batch_size|(logging|eval|save|hub|warn)_.*|"
    "push_to_hub|.*_model_path|max_skipped_steps|async_save|vllm_(server|weights)_.*|"
    # Over how many processes, and how: numbers move by rounding alone.
    "gradient_accumulation_steps|sharding|offload|deepspeed|ds3_gather_for_generation|ddp_timeout"
)
"""Settings that do not decide what a run computes: they may differ where it is resumed."""

SAMPLED = 4096
"""Most elements of a tensor that its fingerprint reads, evenly spread."""

Layout = dict[str, str]
"""What a model consists of: a word for each of its parameters, and for how it is read."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What must be the same where a run is resumed, as JSON can hold it."""

    settings: dict[str, Any]
    """Settings that decide what is computed, the sizes that follow, and the prompts' digest."""

    models: dict[str, Layout]
    """What a checkpoint does not hold, by its values; what it does hold, by its shapes."""

    @classmethod
    def of(
        cls,
        config: PPOConfig,
        schedule: Schedule,
        prompts_digest: str,
        models: Mapping[str, Layout],
    ) -> "Fingerprint":
        """That of a run."""
        settings = {k: v for k, v in vars(config).items() if not AROUND.fullmatch(k)}
        settings |= vars(schedule) | {"prompts": prompts_digest}
        return cls(settings=settings, models=dict(models))

    def as_json(self) -> dict[str, Any]:
        """For the checkpoint."""
        return asdict(self)

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """What is different from the identity in a checkpoint, in words, by name."""
        there, here = saved["settings"], self.settings
        settings = [
            f"written with {name}={there.get(name)!r}, and now it is {here.get(name)!r}"
            for name in _different(here, there)
        ]
        models = [
            _of_model(part, self.models.get(part, {}), saved["models"].get(part, {}))
            for part in _different(self.models, saved["models"])
        ]
        return settings + models


def _different(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    names = [*here, *(name for name in there if name not in here)]
    return [name for name in names if here.get(name) != there.get(name)]


def _of_model(part: str, here: Layout, there: Layout) -> str:
    names = _different(here, there)
    name = names[0]
    return (
        f"written with another {part}: {len(names)} of its parts differ, the first {name}, "
        f"which was {there.get(name, 'not there')} and now is {here.get(name, 'not there')}"
    )


# --- Models --------------------------------------------------------------------


def given_models(
    model: nn.Module,
    ref_model: nn.Module | None,
    reward_models: Iterable[RewardModel],
    *,
    adds_adapter: bool,
) -> dict[str, Layout]:
    """What a checkpoint does not hold of the models that a script hands over, by its values.

    Of a reward model it is also how it is read.
    The policy is among it where the reference is made from it, or stays below an adapter. Call it
    before the models are prepared: afterwards a process may hold a part of them only.
    """
    given: dict[str, nn.Module] = {}
    plain = _without_value_head(model)
    if ref_model is not None:
        given["reference"] = _without_value_head(ref_model)
    if ref_model is None or is_peft(plain) or adds_adapter:
        given["policy"] = plain
    prints = {part: fingerprint(one) for part, one in given.items()}
    for number, one in enumerate(reward_models):
        reading = {name: str(getattr(one, name)) for name in ("bias", "gain", "end_of_text")}
        prints[f"reward model {number}"] = fingerprint(one.model) | reading
    return prints


def _without_value_head(model: nn.Module) -> nn.Module:
    return model.pretrained_model if isinstance(model, ModelWithValueHead) else model


def layout(model: nn.Module) -> Layout:
    """Type and shape of each parameter."""
    return {name: _shape(p) for name, p in model.named_parameters()}


@torch.no_grad()
def fingerprint(model: nn.Module) -> Layout:
    """Type, shape and a digest of a sample of each parameter.

    An adapter that is trained is left out, since a checkpoint holds it.
    """
    skip_trained = is_peft(model)
    return {
        name: f"{_shape(parameter)} {_digest(parameter)}"
        for name, parameter in model.named_parameters()
        if not (skip_trained and parameter.requires_grad)
    }


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    step = max(1, -(-len(flat) // SAMPLED))
    content = flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]
