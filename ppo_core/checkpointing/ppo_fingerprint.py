"""The fingerprint of a PPO run."""

from collections.abc import Iterable, Mapping

from torch import nn

from ppo_core.checkpointing.fingerprint import Fingerprint, Layout, fingerprint
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.models.adapters import is_peft
from ppo_core.models.model_with_value_head import ModelWithValueHead
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.schedule import Schedule


def ppo_fingerprint(
    config: PPOConfig,
    schedule: Schedule,
    prompts_digest: str,
    models: Mapping[str, Layout],
) -> Fingerprint:
    """Return the fingerprint of a run."""
    settings = config.settings_of_result() | vars(schedule) | {"prompts": prompts_digest}
    return Fingerprint(settings=settings, models=dict(models))


def given_models(
    model: nn.Module,
    ref_model: nn.Module | None,
    reward_models: Iterable[RewardModel],
    reward_modules: Iterable[nn.Module] = (),
    *,
    adds_adapter: bool,
) -> dict[str, Layout]:
    """Return fingerprints, with digests of weights, of models that a checkpoint does not contain.

    The fingerprint of a reward model includes its bias, gain and end_of_text. If no reference is
    given, the policy is included, because the reference is made from the policy. If the policy has
    or gets an adapter, the policy is also included, because its base is frozen. Call this function
    before the models are prepared, when each process still has the full weights.
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
