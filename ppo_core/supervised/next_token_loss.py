"""The loss of SFT: a language model's cross entropy at the labels that count."""

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ppo_core.algorithm.temperature import at_least_fp32
from ppo_core.data.types import TokenRows
from ppo_core.errors import ModelError
from ppo_core.models.adapters import plain_model
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.policy import LanguageModel
from ppo_core.supervised.examples.sft_examples import IGNORED_LABEL

logger = logging.getLogger(__name__)


class NextTokenLoss(nn.Module):
    """A module around a language model; its forward pass returns the weighted loss of examples.

    The LM head is applied only at counted positions, and the logits of all these positions are
    never in memory together. For a model without a `DecoderBackbone`, the loss is computed from the
    logits of all tokens.
    """

    metrics = ()

    def __init__(self, model: nn.Module) -> None:
        """Wrap a causal language model or its PeftModel; the model is trained in place."""
        super().__init__()
        # In checkpoints, the names of the parameters begin with the name of this attribute.
        self.model = model
        self.backbone: DecoderBackbone | None = None
        try:
            language_model = LanguageModel(plain_model(model))
        except ModelError as error:
            logger.info("The logits of all tokens are computed. %s", error)
            return
        if isinstance(language_model.backbone, DecoderBackbone):
            language_model.backbone.passes_mask = True
            self.backbone = language_model.backbone
            # Only the method is stored. As an attribute, the LanguageModel would register the model
            # under a second name, and ZeRO-3 would run its hooks for each name.
            self._predict = language_model.predict

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss () summed over counted tokens, and the sums of `metrics` (0,).

        input_ids, labels and attention_mask are (B, S). weights (B,) has one weight per example,
        which counts for all tokens of the example.
        """
        row, position = _counted(labels).nonzero(as_tuple=True)
        targets, weight = labels[row, position + 1], weights[row]
        no_metrics = torch.zeros(0, device=labels.device)
        if self.backbone is None:
            output = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
            predicted = at_least_fp32(output.logits[row, position])
            losses = cross_entropy(predicted, targets, reduction="none")
            return (weight * losses).sum(), no_metrics
        lengths = attention_mask.sum(dim=1)
        rows = TokenRows(
            ids=input_ids,
            lengths=lengths,
            prompt_lengths=torch.ones_like(lengths),
            row=row,
            state=position,
            targets=targets,
        )
        states = self.backbone.states(rows)
        loss = self._predict(
            states, rows, 1.0, lambda logprobs, part: -weight[part] * logprobs
        ).loss
        return loss, no_metrics

    def units(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number () of counted tokens of a batch; a step's loss is a mean over them.

        Tokens of an example of weight 0 do not count.
        """
        return (_counted(batch["labels"]) & (batch["weights"] > 0).unsqueeze(1)).sum()


def _counted(labels: Tensor) -> Tensor:
    """Return whether the token after each position has a loss, as (B, S - 1)."""
    return labels[:, 1:] != IGNORED_LABEL
