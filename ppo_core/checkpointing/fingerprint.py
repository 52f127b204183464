"""The fingerprint of a run: settings, prompts and models that a resumed run must share."""

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
    "push_to_hub|.*_model_path|max_skipped_steps|max_steps|async_save|vllm_(server|weights)_.*|"
    # The number of processes and the sharding change results by rounding only.
    "gradient_accumulation_steps|sharding|offload|deepspeed|ds3_gather_for_generation|ddp_timeout"
)
"""Pattern of settings that do not change a run's results, and may differ in a resumed run."""

SAMPLED = 4096
"""Maximum number of elements of a tensor in its digest; the elements are evenly spaced."""

Layout = dict[str, str]
"""Descriptions of a model's parameters, and of a reward model's score settings, by name."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Settings and models that a resumed run must share with the run of the checkpoint."""

    settings: dict[str, Any]
    """Settings that change the results, the sizes of the run, and the digest of the prompts."""

    models: dict[str, Layout]
    """Descriptions of the models by role: shapes, and digests of models not in the checkpoint."""

    @classmethod
    def of(
        cls,
        config: PPOConfig,
        schedule: Schedule,
        prompts_digest: str,
        models: Mapping[str, Layout],
    ) -> "Fingerprint":
        """Return the fingerprint of a run."""
        settings = {k: v for k, v in vars(config).items() if not AROUND.fullmatch(k)}
        settings |= vars(schedule) | {"prompts": prompts_digest}
        return cls(settings=settings, models=dict(models))

    def as_json(self) -> dict[str, Any]:
        """Return the fingerprint in the form in which a checkpoint holds it."""
        return asdict(self)

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return a phrase for each difference from a checkpoint's fingerprint `saved`."""
        old, new = saved["settings"], self.settings
        settings = [
            f"written with {name}={old.get(name)!r}, which is now {new.get(name)!r}"
            for name in _different(new, old)
        ]
        models = [
            _of_model(part, self.models.get(part, {}), saved["models"].get(part, {}))
            for part in _different(self.models, saved["models"])
        ]
        return settings + models


def _different(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    names = [*new, *(name for name in old if name not in new)]
    return [name for name in names if new.get(name) != old.get(name)]


def _of_model(part: str, new: Layout, old: Layout) -> str:
    names = _different(new, old)
    name = names[0]
    return (
        f"written with another {part}: {len(names)} entries differ, the first of them {name}, "
        f"which was {old.get(name, 'missing')} and is now {new.get(name, 'missing')}"
    )


# --- Models --------------------------------------------------------------------


def given_models(
    model: nn.Module,
    ref_model: nn.Module | None,
    reward_models: Iterable[RewardModel],
    reward_modules: Iterable[nn.Module] = (),
    *,
    adds_adapter: bool,
) -> dict[str, Layout]:
    """Return fingerprints, with digests of weights, of the models that a checkpoint does not hold.

    The fingerprint of a reward model includes its bias, gain and end_of_text. The policy is
    included if the reference is a copy of the policy, or if the policy is the frozen base of an
    adapter. Call this before the models are prepared, when each process still holds full weights.
    """
    given: dict[str, nn.Module] = {}
    plain = _without_value_head(model)
    if ref_model is not None:
        given["reference"] = _without_value_head(ref_model)
    if ref_model is None or is_peft(plain) or adds_adapter:
        given["policy"] = plain
    fingerprints = {part: fingerprint(given_model) for part, given_model in given.items()}
    for number, reward in enumerate(reward_models):
        reading = {name: str(getattr(reward, name)) for name in ("bias", "gain", "end_of_text")}
        fingerprints[f"reward model {number}"] = fingerprint(reward.model) | reading
    for number, module in enumerate(reward_modules):
        fingerprints[f"reward module {number}"] = fingerprint(module)
    return fingerprints


def _without_value_head(model: nn.Module) -> nn.Module:
    return model.pretrained_model if isinstance(model, ModelWithValueHead) else model


def layout(model: nn.Module) -> Layout:
    """Return dtype and shape of each parameter, by name."""
    return {name: _shape(p) for name, p in model.named_parameters()}


@torch.no_grad()
def fingerprint(model: nn.Module) -> Layout:
    """Return dtype, shape and a digest of sampled elements of each parameter, by name.

    The trained parameters of an adapter are left out, because a checkpoint holds them.
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
