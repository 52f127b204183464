"""The fingerprint of a run: settings, data and models that a resumed run must share."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.config.spelling import OLD_NAMES
from ppo_core.distributed.init_distributed import launched_precision
from ppo_core.models.adapters import is_peft

SAMPLED = 4096
"""Maximum number of a tensor's elements in the digest; the elements are evenly spaced."""

PRETRAIN_DATASET = "pretrain_dataset"
"""Entry with the digest of the pretraining texts; checkpoints of earlier versions lack it."""

Layout = dict[str, str]
"""Descriptions by name, for example of a model's parameters or a reward model's score settings."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Settings and models that a resumed run must share with the run of the checkpoint."""

    settings: dict[str, Any]
    """Settings that change the results, plus the sizes of the run and the digest of the data."""

    models: dict[str, Layout]
    """Role -> shapes of the model, and digests of weights that checkpoints do not contain."""

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """Return a phrase for each difference from a checkpoint's fingerprint `saved`."""
        old, new = _in_use(saved["settings"]), _in_use(self.settings)
        old.setdefault(PRETRAIN_DATASET, new.get(PRETRAIN_DATASET))
        # Earlier versions stored bf16=False even if a launcher made passes compute in bfloat16.
        if new.get("bf16") and launched_precision() == "bf16":
            old["bf16"] = True
        settings = [
            f"written with {name}={old.get(name)!r}, which is now {new.get(name)!r}"
            for name in _different(new, old)
        ]
        models = [
            _of_model(part, self.models.get(part, {}), saved["models"].get(part, {}))
            for part in _different(self.models, saved["models"])
        ]
        return settings + models


ADDED = {
    "advantage_estimator": "gae",
    "samples_per_prompt": 1,
    "scale_by_group_std": True,
    "scale_each_reward": False,
}
"""Settings that version 0.1 does not have, with the values that reproduce its results."""


BY_ROUNDING = ("per_device_train_batch_size", "max_tokens_per_microbatch", "gradient_checkpointing")
"""Settings that change results by rounding only, but are in fingerprints of earlier versions."""


def _in_use(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without unused ones, whose defaults may differ between versions."""
    unused = BY_ROUNDING if settings.get("kl_target") else (*BY_ROUNDING, "kl_horizon")
    current = {OLD_NAMES.get(name, name): value for name, value in settings.items()}
    return {name: value for name, value in {**ADDED, **current}.items() if name not in unused}


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


def layout(model: nn.Module) -> Layout:
    """Return dtype and shape of each parameter, by name."""
    return {name: _shape(p) for name, p in model.named_parameters()}


@torch.no_grad()
def fingerprint(model: nn.Module) -> Layout:
    """Return dtype, shape and a digest of sampled elements of each parameter, by name.

    The trained parameters of a PeftModel are left out, because a checkpoint contains them.
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
