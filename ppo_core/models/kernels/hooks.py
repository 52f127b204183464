"""Modules that do more when they are called than their class says."""

from torch import nn
from torch.nn.modules import module as torch_modules

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
)
"""Attributes of a module. Hooks on loading are not among them: quantized layers have some, and they
run before any pass."""


def is_hooked(module: nn.Module) -> bool:
    """Whether a module, without its children, has a hook or a `forward` of its own.

    Global module hooks count for every module.
    """
    return bool(
        "forward" in vars(module)
        or any(getattr(module, name) for name in _HOOKS)
        or torch_modules._has_any_global_hook()
    )
