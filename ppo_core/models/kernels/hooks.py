"""Detect modules whose call runs other code than the `forward` of their class."""

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
"""Attributes of a module that hold its hooks. Hooks on loading a state dict are not listed:
quantized layers have such hooks, and these hooks run before any forward pass."""


def is_hooked(module: nn.Module) -> bool:
    """Return whether a module has a hook, or its own `forward` instead of its class's `forward`.

    The module's children are not checked. A global module hook counts as a hook of every module.
    """
    return bool(
        "forward" in vars(module)
        or any(getattr(module, name) for name in _HOOKS)
        or torch_modules._has_any_global_hook()
    )
