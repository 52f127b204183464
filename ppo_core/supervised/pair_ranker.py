"""The reward model during training: a last-token classifier, and the loss of response pairs."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from ppo_core.algorithm.temperature import at_least_fp32
from ppo_core.data.batching import pad_rows
from ppo_core.data.text_config import text_config
from ppo_core.errors import ModelError
from ppo_core.models.backbones import DecoderBackbone
from ppo_core.rollout.decoding_check import check_padding, difference_of, relative, sequences_of


def make_classifier(policy: PreTrainedModel, pad_token_id: int | None) -> PreTrainedModel:
    """Return a classifier with one label on the policy's backbone; its head is uninitialized.

    The backbone is not copied, because two models may not fit into memory.
    `AutoModelForSequenceClassification.from_pretrained` is not used: if a checkpoint stores tied
    embeddings under the name of the LM head, that method uses random embeddings and only logs a
    message.

    Raises:
        ModelError: the classifier of this model type has another backbone.
    """
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    config.pad_token_id = pad_token_id
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
    backbone = policy.base_model
    if type(classifier.base_model) is not type(backbone):
        other = f"its backbone is a {type(classifier.base_model).__name__}"
        raise no_ranker(
            classifier, f"{other}, and the policy's backbone is a {type(backbone).__name__}"
        )
    setattr(classifier, classifier.base_model_prefix, backbone)
    for module in classifier.children():
        if module is not backbone:
            module.to_empty(device=policy.device)
    return classifier


class PairRanker(nn.Module):
    """A module around a classifier; its forward pass scores pairs and returns their summed loss.

    The score is read at the last token of the sequence, whose position follows from the sequence
    length. A search for the pad id would fail if a text contains the pad id, or if pad equals eos.
    """

    def __init__(
        self,
        classifier: PreTrainedModel,
        *,
        center_rewards_coefficient: float = 0.0,
        keeps_head: bool = False,
    ) -> None:
        """Initialize the classifier's head; the classifier is trained in place.

        The head's weights are drawn from N(0, 1 / (d + 1)) for a hidden size of d, so that the
        initial scores are near 0 (arXiv:2403.17031). With `keeps_head`, a trained head stays.

        Raises:
            ModelError: the classifier has no linear layer `score` on a backbone, or the states of a
                padded batch differ from the states of each text alone.
        """
        super().__init__()
        self.metrics = "accuracy", "margin"
        head = getattr(classifier, "score", None)
        if not isinstance(head, nn.Linear) or classifier.base_model is classifier:
            raise no_ranker(classifier, "it has no linear layer 'score' on the policy's backbone")
        self.classifier = classifier
        self.backbone = DecoderBackbone(classifier.base_model)
        self._check_states()
        self._centering = center_rewards_coefficient
        if not keeps_head:
            nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))

    def forward(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        margins: Tensor,
        weights: Tensor,
        given: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss () of B pairs, and the sums of `metrics` (2,) without a gradient.

        The loss is a weighted sum over the pairs; the metrics are sums over the pairs whose weight
        is above 0. The shapes are input_ids (B, 2, S), lengths (B, 2), margins (B,) and weights
        (B,). In dimension 1, index 0 is the chosen response and index 1 the rejected response.

        `given` (N,) are the row indices of the existing sequences in `input_ids.flatten(0, 1)`. A
        missing response has the score 0. If `given` is None, all sequences exist.
        """
        if given is None:
            scores = self.score(self.backbone.last_states(input_ids, lengths))
        else:
            sequences, last = input_ids.flatten(0, 1)[given], lengths.flatten()[given] - 1
            number = torch.arange(len(given), device=given.device)
            existing = self.score(self.backbone.states_at(sequences, number, last, last + 1))
            scores = existing.new_zeros(lengths.numel()).index_copy(0, given, existing)
        chosen, rejected = scores.view(-1, 2).unbind(1)
        losses = preference_losses(chosen, rejected, margins)
        losses = losses + self._centering * centering_losses(chosen, rejected)
        differences, counted = (chosen - rejected).detach(), (weights > 0).float()
        # Multiply and sum instead of `@`, because autocast would compute `@` in bfloat16.
        sums = torch.stack([((differences > 0) * counted).sum(), (differences * counted).sum()])
        return (losses * weights).sum(), sums

    @torch.no_grad()
    def _check_states(self) -> None:
        """Choose the fastest way to compute padded pairs that does not change the texts' states.

        PPO scores single texts, so a text must have the same states in a pair and alone.

        Raises:
            ModelError: every way changes the states.
        """
        classifier, backbone = self.classifier.eval(), self.backbone
        config = text_config(classifier.config)
        _, longer, shorter = sequences_of(
            [list(range(2, 30))], config, vocabulary=config.vocab_size
        )
        texts = [longer, longer[:3] + shorter[3:]]
        pair, lengths = (part.to(classifier.device)[None] for part in pad_rows(texts))
        rows = zip(pair[0], lengths[0].tolist(), strict=True)
        alone = torch.cat([backbone.hidden_states(row[None, :n])[:, -1] for row, n in rows])

        def difference() -> float:
            return difference_of(classifier, relative(backbone.last_states(pair, lengths), alone))

        check_padding("reward model's states", classifier, backbone, difference)

    def units(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number () of pairs of a batch whose weight is above 0.

        The loss of a step is divided by this number, not by the sum of weights: rows of similar
        length share a step, so all pairs of a step may come from a data set with a low weight, and
        dividing by the sum of weights would cancel this weight.
        """
        return (batch["weights"] > 0).sum()

    def score(self, states: Tensor) -> Tensor:
        """Return the scores (N,) of sequences by the hidden states (N, D) of their last tokens."""
        scores: Tensor = self.classifier.get_submodule("score")(states)
        return at_least_fp32(scores.squeeze(-1))


def no_ranker(classifier: PreTrainedModel, reason: str) -> ModelError:
    """Return the error for a classifier that cannot score the last token, because of `reason`."""
    return ModelError(
        f"{type(classifier).__name__} is not a last-token classifier, because {reason}. Start from "
        "a decoder-only model such as Llama, GPT-2, GPT-NeoX or Qwen2."
    )


def preference_losses(chosen: Tensor, rejected: Tensor, margins: Tensor | float = 0.0) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) of each pair; all tensors are (B,).

    Without margins, this is eq. 1 of arXiv:1909.08593; with margins, eq. 2 of arXiv:2307.09288.
    """
    return -logsigmoid(chosen - rejected - margins)


def centering_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return (chosen + rejected)^2 of each pair; all tensors are (B,) (arXiv:2312.09244).

    Preferences determine scores only up to a constant; this loss pulls the mean score towards 0.
    """
    return (chosen + rejected) ** 2
