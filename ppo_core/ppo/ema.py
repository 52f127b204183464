"""Exponential moving average of the policy's weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ppo_core.algorithm.temperature import at_least_fp32
from ppo_core.errors import TrainingError


class WeightAverage:
    """Exponential moving average of a model's trainable weights, in fp32 or higher precision.

        mean[0] = weights[0];   mean[k] = decay * mean[k-1] + (1 - decay) * weights[k]

    Averaged weights vary less than the last weights (Polyak & Juditsky 1992, "Acceleration of
    Stochastic Approximation by Averaging"). OpenRLHF averages policies in the same way. The mean
    needs memory for one fp32 copy of the trained weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Initialize the mean with the model's weights, which must not be sharded."""
        self._decay = decay
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._means = {name: at_least_fp32(p.detach()).clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Add the current weights to the mean; call this once after each PPO update."""
        for name, mean in self._means.items():
            weights = at_least_fp32(self._weights[name].detach())
            mean.mul_(self._decay).add_(weights, alpha=1 - self._decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the averaged weights into the model; restore the model's own weights at the end.

        The context needs memory for a second copy of the trained weights.
        """
        own = {name: p.detach().clone() for name, p in self._weights.items()}
        self._set_weights(self._means)
        try:
            yield
        finally:
            self._set_weights(own)

    def tensors(self) -> dict[str, Tensor]:
        """Return the averaged weights by parameter name, without a copy, for a checkpoint."""
        return dict(self._means)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the averaged weights that `tensors` returned.

        Raises:
            TrainingError: the names or shapes of the parameters differ.
        """
        here = {name: tuple(mean.shape) for name, mean in self._means.items()}
        there = {name: tuple(mean.shape) for name, mean in tensors.items()}
        if different := sorted(here.items() ^ there.items()):
            name, _ = different[0]
            raise TrainingError(
                f"The averaged weights in the checkpoint do not fit the policy: {name!r} has the "
                f"shape {there.get(name)} in the checkpoint, but {here.get(name)} in the policy. "
                "Resume with the model that wrote the checkpoint."
            )
        for name, mean in self._means.items():
            mean.copy_(tensors[name])

    @torch.no_grad()
    def _set_weights(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._weights.items():
            parameter.copy_(values[name])
