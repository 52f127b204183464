"""The engine that trains with DeepSpeed."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from torch import Tensor, nn
from torch.optim import Optimizer

from ppo_core.distributed import zero_checkpoint_shards
from ppo_core.distributed.engine import Engine, Model, StateOf
from ppo_core.distributed.optimizer_shards import check_shape


class DeepSpeedEngine(Engine):
    """Trains with DeepSpeed: data parallel, or with ZeRO-1, -2 or -3.

    At ZeRO stage 0, PyTorch's optimizer takes the steps, as without DeepSpeed.
    """

    def __init__(self, **options: Any) -> None:
        """Connect this process to the other processes; see `Engine` for the options."""
        super().__init__(**options)
        self._trained: Any = None  # DeepSpeed's engine around the trained module
        self._frozen: dict[nn.Module, Any] = {}  # DeepSpeed's engines around frozen models
        self._plugin: DeepSpeedPlugin = self.accelerator.deepspeed_plugin

    def _prepared(self, module: nn.Module, optimizer: Optimizer) -> nn.Module:
        if self.sharding == "zero3":
            _partition(module, self._plugin, self.device)
        self._trained, _ = self.accelerator.prepare(module, optimizer)
        return self._trained

    def prepare_frozen(self, model: Model) -> Model:
        """Freeze a model; shard it under zero3, otherwise move it to the device.

        Return the same object.
        """
        super().prepare_frozen(model)
        if self.sharding == "zero3":
            self._frozen[model] = _initialize_frozen(model, self._plugin, self.device)
        return model

    def unwrap(self, module: nn.Module) -> nn.Module:
        """Return the module inside DeepSpeed's wrapper, or the module itself."""
        from deepspeed import DeepSpeedEngine as Wrapper

        inner: nn.Module = module.module if isinstance(module, Wrapper) else module
        return inner

    def accumulate_only(self, module: nn.Module, accumulate: bool) -> AbstractContextManager[None]:
        """Tell DeepSpeed whether the gradients of the next microbatch complete a step."""
        self._trained.set_gradient_accumulation_boundary(not accumulate)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss; see `Engine.backward`."""
        self._trained.backward(loss * self.num_processes)

    def step(self, module: nn.Module, optimizer: Optimizer, max_grad_norm: float) -> Tensor:
        """Clip the gradients and take the optimizer step; see `Engine.step`.

        If the norm is not finite, ZeRO skips the step. All processes compute the same norm, so all
        of them skip the step.
        """
        if not zero_stage(module):
            return super().step(module, optimizer, max_grad_norm)
        zero: Any = module
        zero.optimizer.clip_grad = max_grad_norm
        zero.step()
        return torch.as_tensor(zero.get_global_grad_norm(), device=zero.device)

    def discard(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Zero the gradients without a step, even between two microbatches."""
        if zero_stage(module):
            # zero_grad would drop DeepSpeed's buffers of offloaded gradients.
            _discard(module)
        else:
            super().discard(module, optimizer)

    def gathered(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which a prepared module is unsharded; see `Engine.gathered`."""
        sharder = self._frozen.get(module, module)
        if zero_stage(sharder) == 3:
            if self.gathers_layers:
                return _gathered_module(sharder)
            _forget_order(sharder)
        return nullcontext()

    def _readable(self, tensor: Tensor) -> AbstractContextManager[Any]:
        return _gathered_parameter(tensor)

    def _write(self, name: str, parameter: nn.Parameter, weight: Tensor) -> None:
        check_shape(name, zero_checkpoint_shards.full_shape(parameter), weight.shape)
        zero_checkpoint_shards.set_weight(parameter, weight)

    def load_weights(self, module: nn.Module, weight_of: Callable[[str], Tensor | None]) -> None:
        """Copy unsharded tensors into the parameters; see `Engine.load_weights`."""
        if zero_stage(module):
            zero_checkpoint_shards.load_weights(module, weight_of)
        else:
            super().load_weights(module, weight_of)

    def optimizer_states(
        self, module: nn.Module, optimizer: Optimizer
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the unsharded optimizer states; see `Engine.optimizer_states`."""
        if zero_stage(module):
            return zero_checkpoint_shards.optimizer_states(module)
        return super().optimizer_states(module, optimizer)

    def load_optimizer_states(
        self, module: nn.Module, optimizer: Optimizer, state_of: StateOf
    ) -> None:
        """Restore optimizer states; see `Engine.load_optimizer_states`.

        Raises:
            TrainingError: under ZeRO, a tensor and its parameter differ in shape.
        """
        if zero_stage(module):
            zero_checkpoint_shards.load_optimizer_states(module, state_of)
        else:
            super().load_optimizer_states(module, optimizer, state_of)


def zero_stage(module: nn.Module) -> int:
    """Return the ZeRO stage of a module; 0 without ZeRO."""
    stage = getattr(module, "zero_optimization_stage", None)
    return int(stage()) if stage else 0


def _partition(module: nn.Module, plugin: DeepSpeedPlugin, device: torch.device) -> None:
    """Shard the parameters for ZeRO-3 one at a time: the full module may not fit on the device.

    DeepSpeed itself would first move the full module to the device. If parameters are sharded
    already, because another model shares them, only the buffers are moved.
    """
    from deepspeed.runtime.zero import Init

    if not any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        offloaded = plugin.deepspeed_config["zero_optimization"].get("offload_param", {})
        remote = offloaded.get("device", "none")
        Init(
            module=module,
            config_dict_or_path=plugin.deepspeed_config,
            remote_device=None if remote == "none" else remote,
        )
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def _initialize_frozen(model: nn.Module, plugin: DeepSpeedPlugin, device: torch.device) -> Any:
    """Shard the parameters of a frozen model; return DeepSpeed's engine around the model."""
    import deepspeed

    _partition(model, plugin, device)
    settings = copy.deepcopy(plugin.deepspeed_config)
    settings["zero_optimization"].pop("offload_optimizer", None)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    return engine


def _discard(module: Any) -> None:
    """Drop the gradients of a module under ZeRO-1, -2 or -3, even between two microbatches.

    DeepSpeed has no function for this, but drops gradients whose norm is NaN. So make the norm NaN.
    """
    from deepspeed.utils import safe_set_local_grad

    module.set_gradient_accumulation_boundary(True)
    zero = module.optimizer
    if zero_stage(module) == 3:
        if not zero.offload_optimizer and not any(zero.averaged_gradients.values()):
            return  # there was no backward pass
        parameter = next(p for p in module.parameters() if p.requires_grad)
        safe_set_local_grad(parameter, torch.full_like(parameter.ds_tensor, torch.nan))
        module.step()
        return
    # The backward pass has already computed the norms of offloaded gradients, so a NaN gradient
    # would have no effect now. Replace the function that returns the global norm instead.
    zero.scaled_global_norm = lambda: torch.tensor(torch.nan, device=module.device)
    try:
        module.step()
    finally:
        del zero.scaled_global_norm


@contextmanager
def _gathered_module(module: Any) -> Iterator[None]:
    """Unshard a ZeRO-3 module inside the context, so that forward passes need no communication.

    The processes may then run different numbers of passes. Do not change weights in the context.
    """
    from deepspeed.runtime.zero import unwrap_model_for_generation

    fetcher = _fetcher(module)
    try:
        with unwrap_model_for_generation(module):
            yield
    finally:
        # DeepSpeed restores its fetching hooks, but not after an error.
        if not fetcher.forward_hooks:
            fetcher._register_deepspeed_module(fetcher.module)


def _forget_order(module: Any) -> None:
    """Make DeepSpeed fetch parameters on demand in the next passes, which are not training steps.

    DeepSpeed records the order of the parameters in a training step, and prefetches in this order.
    It would prefetch in the wrong order now, and record these passes as a training step.
    """
    coordinator = _fetcher(module).get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()


def _fetcher(module: Any) -> Any:
    """Return the object that fetches the parameters of a trained or frozen module under ZeRO-3."""
    return getattr(module.optimizer, "parameter_offload", module.optimizer)


def _gathered_parameter(parameter: Any) -> AbstractContextManager[Any]:
    """Return a context in which a parameter is unsharded, whether or not ZeRO-3 shards it."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters, ZeroParamStatus

    return GatheredParameters([parameter], enabled=parameter.ds_status != ZeroParamStatus.AVAILABLE)
