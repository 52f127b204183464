"""Options of an optimizer and its schedule as JSON, and back to the bit."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ppo_core.checkpointing.files import JSON
from ppo_core.errors import TrainingError

EXECUTION = {"params", "fused", "foreach", "capturable", "differentiable"}
"""Options of a group that say how a step is computed, which follows from the machine."""


def optimizer_options(optimizer: Optimizer) -> JSON:
    """What kind of optimizer it is, and what its groups are set to."""
    return {
        "kind": type(optimizer).__name__,
        "groups": [
            {name: value for name, value in group.items() if name not in EXECUTION}
            for group in optimizer.param_groups
        ],
    }


def restore_options(optimizer: Optimizer, saved: JSON) -> None:
    """Put back what `optimizer_options` gave."""
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        for name, value in options.items():
            # JSON has no tuples, which Adam's betas are.
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value


def check_optimizer_fits(optimizer: Optimizer, saved: JSON) -> None:
    """Refuse the state of another optimizer, or of one with another number of groups.

    It is never started afresh instead (NeMo-RL #3171).

    Raises:
        TrainingError: it is; the message says what is different.
    """
    kind, number = type(optimizer).__name__, len(optimizer.param_groups)
    if saved["kind"] != kind:
        misfit = f"it is that of {saved['kind']}, here is {kind}"
    elif len(saved["groups"]) != number:
        misfit = f"it has {len(saved['groups'])} groups of parameters, here are {number}"
    else:
        return
    raise TrainingError(
        f"The optimizer state of the checkpoint does not fit: {misfit}. Without it training "
        "would start its moments afresh. Resume with the models and settings that wrote the "
        "checkpoint, or start a new run from its policy."
    )


def set_course(scheduler: LambdaLR, step: int) -> None:
    """The learning rates that a schedule has after so many steps."""
    scheduler.last_epoch = step
    courses = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    rates = [base * course(step) for base, course in courses]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates
