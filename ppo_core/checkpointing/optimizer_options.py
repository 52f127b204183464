"""Save the options of an optimizer and its schedule as JSON, and restore them bit for bit."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ppo_core.checkpointing.read_checkpoint import JSON
from ppo_core.errors import TrainingError

EXECUTION = {"params", "fused", "foreach", "capturable", "differentiable"}
"""Keys of a parameter group to leave out: the parameters, and options that select kernels."""


def optimizer_options(optimizer: Optimizer) -> JSON:
    """Return the class name of an optimizer and the options of its parameter groups."""
    return {
        "kind": type(optimizer).__name__,
        "groups": [
            {name: value for name, value in group.items() if name not in EXECUTION}
            for group in optimizer.param_groups
        ],
    }


def restore_options(optimizer: Optimizer, saved: JSON) -> None:
    """Restore the options that `optimizer_options` returned."""
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        for name, value in options.items():
            # JSON turns tuples, such as Adam's betas, into lists.
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def check_optimizer_fits(optimizer: Optimizer, saved: JSON) -> None:
    """Raise if a saved state has another optimizer class or number of parameter groups.

    If such a state were accepted, moments could silently start from zero (NeMo-RL #3171).

    Raises:
        TrainingError: the state does not fit; the message names the difference.
    """
    kind, number = type(optimizer).__name__, len(optimizer.param_groups)
    if saved["kind"] != kind:
        misfit = f"it belongs to {saved['kind']}, but this run uses {kind}"
    elif len(saved["groups"]) != number:
        misfit = f"it has {len(saved['groups'])} parameter groups, but this run has {number}"
    else:
        return
    raise TrainingError(
        f"The optimizer state of the checkpoint does not fit: {misfit}. Without this state "
        "the moments would start from zero. Resume with the models and settings that wrote the "
        "checkpoint, or start a new run in another output_dir."
    )


def restore_schedule(scheduler: LRScheduler, saved: JSON) -> None:
    """Restore a learning-rate schedule from its state, which was stored as JSON."""
    scheduler.load_state_dict(_with_numbers_as_keys(saved, scheduler.state_dict()))


def _with_numbers_as_keys(saved: Any, own: Any) -> Any:
    """Return `saved` with integer keys in each dict whose counterpart in `own` has integer keys.

    JSON turns integer keys into strings, so MultiStepLR would find none of its milestones.
    """
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [_with_numbers_as_keys(*pair) for pair in zip(saved, own, strict=True)]
    if not isinstance(saved, dict) or not isinstance(own, dict):
        return saved
    if own and all(isinstance(key, int) for key in own):
        # The class of `own` may be a Counter.
        return type(own)({int(key): value for key, value in saved.items()})
    return {key: _with_numbers_as_keys(value, own.get(key)) for key, value in saved.items()}


def set_schedule_step(scheduler: LambdaLR, step: int) -> None:
    """Advance a schedule to `step` optimizer steps, and set the learning rates of that step."""
    scheduler.last_epoch = step
    schedules = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * factor(step) for base, factor in schedules]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
