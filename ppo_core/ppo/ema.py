"""A running mean of the policy's weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ppo_core.algorithm.logits import at_least_fp32
from ppo_core.errors import TrainingError


class WeightAverage:
    """Exponentially weighted mean of a model's trainable weights, at least in fp32.

        mean[0] = weights[0];   mean[k] = decay * mean[k-1] + (1 - decay) * weights[k]

    Averaged weights vary less than the last ones do (Polyak & Juditsky 1992, "Acceleration of
    Stochastic Approximation by Averaging"); OpenRLHF keeps such a mean of a policy. It takes the
    memory of one fp32 copy of what is trained.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start the mean at the model's weights; whole ones, not a process's shard of them."""
        self._decay = decay
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._means = {name: at_least_fp32(p.detach()).clone() for name, p in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now; once after each PPO update."""
        for name, mean in self._means.items():
            weights = at_least_fp32(self._weights[name].detach())
            mean.mul_(self._decay).add_(weights, alpha=1 - self._decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model has the mean for weights inside of the `with`, and its own ones afterwards.

        Takes another copy of what is trained while it lasts.
        """
        own = {name: p.detach().clone() for name, p in self._weights.items()}
        self._set_weights(self._means)
        try:
            yield
        finally:
            self._set_weights(own)

    def tensors(self) -> dict[str, Tensor]:
        """The mean by the names of the parameters, not copied: for a checkpoint."""
        return dict(self._means)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave.

        Raises:
            TrainingError: it is the mean of other parameters.
        """
        here = {name: tuple(mean.shape) for name, mean in self._means.items()}
        there = {name: tuple(mean.shape) for name, mean in tensors.items()}
        if different := sorted(here.items() ^ there.items()):
            name, _ = different[0]
            raise TrainingError(
                f"The mean of the weights in the checkpoint does not fit the policy: {name!r} has "
                f"the shape {there.get(name)} there and {here.get(name)} here. Resume with the "
                "model that wrote the checkpoint."
            )
        for name, mean in self._means.items():
            mean.copy_(tensors[name])

    @torch.no_grad()
    def _set_weights(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self._weights.items():
            parameter.copy_(values[name])
