"""The loss of SFT: a language model's cross entropy at the labels that count."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ppo_core.algorithm.logits import at_least_fp32
from ppo_core.supervised.examples.sft_examples import IGNORED_LABEL


class NextTokenLoss(nn.Module):
    """A module around a language model; its forward pass returns the summed loss of examples."""

    metrics = ()

    def __init__(self, model: nn.Module) -> None:
        """Wrap a causal language model or its PeftModel; the model is trained in place."""
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss () summed over counted tokens, and the sums of `metrics` (0,).

        input_ids, labels and attention_mask are (B, S), and weights are (B,). An example of weight
        0 does not count.
        """
        row, position = _counted(labels, weights).nonzero(as_tuple=True)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        predicted = at_least_fp32(output.logits[row, position])
        loss = cross_entropy(predicted, labels[row, position + 1], reduction="sum")
        return loss, torch.zeros(0, device=loss.device)

    def units(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number () of counted tokens of a batch; a step's loss is a mean over them."""
        return _counted(batch["labels"], batch["weights"]).sum()


def _counted(labels: Tensor, weights: Tensor) -> Tensor:
    """Return whether the token after each position counts, as (B, S - 1)."""
    return (labels[:, 1:] != IGNORED_LABEL) & (weights > 0).unsqueeze(1)
