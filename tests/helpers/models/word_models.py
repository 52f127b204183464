"""Reward models with scores that a reader can compute: transformers models, untrained."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from ppo_core.models.reward_model import RewardModel
from tests.helpers.models.tiny import EOS, PAD, VOCABULARY, make_tokenizer


class WordConfig(PreTrainedConfig):
    model_type = "words"


class WordModel(PreTrainedModel):
    """Score a text by the values of its words, combined by a rule."""

    config_class = WordConfig

    def __init__(self, rule: str, values: Tensor) -> None:
        super().__init__(WordConfig(num_labels=1, max_position_embeddings=64))
        self.rule = rule
        self.values = nn.Embedding.from_pretrained(values[:, None])

    def get_input_embeddings(self) -> nn.Embedding:
        return self.values

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SequenceClassifierOutput:
        rows = [
            ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask.bool(), strict=True)
        ]
        scores = [self._score(self.values(ids)[:, 0], ids) for ids in rows]
        if self.rule == "leaks":
            scores = [score + sum(scores) for score in scores]
        if self.rule == "reads fillers":
            scores = list(self.values(input_ids)[..., 0].sum(dim=1))
        return SequenceClassifierOutput(logits=torch.stack(scores)[:, None])

    def _score(self, values: Tensor, ids: Tensor) -> Tensor:
        rules = {
            "mean": lambda: values.mean(),
            "last": lambda: values[-1],
            "last but one": lambda: values[-2:][0],
            "repeats": lambda: torch.tensor(float(len(ids) - len(ids.unique()))),
            "falls": lambda: (ids[1:] < ids[:-1]).float().sum(),
        }
        return rules.get(self.rule, lambda: values.sum())()


def word_reward(
    rule: str = "sum",
    values: Mapping[str, float] | None = None,
    *,
    every: float = 0.0,
    end_of_text: bool = False,
    **vocabulary: Any,
) -> RewardModel:
    """Return a reward model: words have the given values, all other words the value `every`."""
    tokenizer = make_tokenizer(**vocabulary)
    weights = torch.full((VOCABULARY,), every)
    weights[[PAD, EOS]] = 0
    for word, value in (values or {}).items():
        weights[tokenizer.convert_tokens_to_ids(word)] = value
    return RewardModel(WordModel(rule, weights).eval(), tokenizer, end_of_text=end_of_text)
