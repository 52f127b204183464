"""SFT and reward-model training: two losses over transformers.Trainer.

From a shell: `python -m ppo_core.supervised sft|reward --help`.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, PreTrainedModel, set_seed

from ppo_core.algorithm.logits import at_least_fp32
from ppo_core.data.prompts import context_length
from ppo_core.errors import ConfigError, DataError, ModelError
from ppo_core.models.loading import load_policy, load_tokenizer
from ppo_core.supervised.config import SupervisedConfig
from ppo_core.supervised.data import collate_examples, collate_pairs, encode_example, encode_pair
from ppo_core.supervised.loop import run_training, save_model
from ppo_core.supervised.lora import adapted, refuse_adapter_folder, require_plain

if TYPE_CHECKING:
    from peft import PeftConfig

# --- The two trainings -----------------------------------------------------------


def train_sft(
    model: str | Path,
    examples: Sequence[Mapping[str, Any]],
    config: SupervisedConfig,
    output_dir: str | Path,
    *,
    peft_config: "PeftConfig | None" = None,
) -> dict[str, float]:
    """Teach a causal model to answer as the examples do.

    The loss is the mean over the counted tokens of an optimizer step. The trained model and its
    tokenizer are saved in `output_dir`.

    Args:
        model: folder or hub id of the model to start from.
        examples: rows as `encode_example` takes them.
        config: the settings.
        output_dir: where to save.
        peft_config: train adapters of this `peft.LoraConfig` (arXiv:2106.09685) in the place of
            all weights; they are merged into the saved model, and kept alone in `adapter/`.

    Returns:
        "loss", the mean over the last tenth of the run; "rows"; "steps" of the
        optimizer; "seconds".

    Raises:
        ConfigError: a setting is for reward models, or the peft_config cannot be used.
        DataError: there are no rows, or a row cannot be used, is empty or too long.
        ModelError: there is no such model, or it has adapters already.
        TrainingError: the loss is not finite.
    """
    if config.centre_rewards_coefficient:
        raise ConfigError(
            f"centre_rewards_coefficient={config.centre_rewards_coefficient} is for reward models; "
            "SFT has no scores to centre. Leave it out."
        )
    refuse_adapter_folder(model)
    tokenizer = load_tokenizer(model)
    rows = [encode_example(tokenizer, row, number, config) for number, row in enumerate(examples)]
    lengths = [len(row["input_ids"]) for row in rows]
    set_seed(config.seed)
    policy = _load_start(model, lengths, config)
    _recompute_activations(policy, config)
    trained = policy if peft_config is None else adapted(policy, peft_config, "CAUSAL_LM")
    metrics = run_training(trained, rows, lengths, collate_examples, config, "SFT", output_dir)
    save_model(trained, tokenizer, output_dir)
    return metrics


def train_reward_model(
    model: str | Path,
    pairs: Sequence[Mapping[str, Any]],
    config: SupervisedConfig,
    output_dir: str | Path,
    *,
    peft_config: "PeftConfig | None" = None,
) -> dict[str, float]:
    """Teach a model to score the chosen response of each pair above the rejected one.

    The model gets a new head with one output, read at the last token. The trained
    model and its tokenizer are saved in `output_dir`.

    Args:
        model: folder or hub id of a decoder-only model, for example the SFT policy.
        pairs: rows as `encode_pair` takes them.
        config: the settings.
        output_dir: where to save.
        peft_config: as of `train_sft`; the head is trained as a whole beside the adapters.

    Returns:
        "loss", the mean over the last tenth of the run; "rows"; "steps" of the
        optimizer; "seconds".

    Raises:
        ConfigError: a setting is for SFT, or the peft_config cannot be used.
        DataError: there are no rows, or a row cannot be used, is empty or too long.
        ModelError: there is no such model, it has adapters already, or its architecture has no
            last-token classifier.
        TrainingError: the loss is not finite.
    """
    if not config.completion_only_loss:
        raise ConfigError(
            "completion_only_loss=False is for SFT; a reward model is trained on scores of whole "
            "texts. Leave it out."
        )
    refuse_adapter_folder(model)
    tokenizer = load_tokenizer(model)
    rows = [encode_pair(tokenizer, row, number, config) for number, row in enumerate(pairs)]
    lengths = [max(len(row["chosen"]), len(row["rejected"])) for row in rows]
    set_seed(config.seed)
    policy = _load_start(model, lengths, config)
    classifier = make_classifier(policy, tokenizer.pad_token_id)
    _recompute_activations(classifier, config)
    ranker = PairRanker(classifier, centre_rewards_coefficient=config.centre_rewards_coefficient)
    # The adapters go into the very layers that the ranker runs.
    trained = classifier if peft_config is None else adapted(classifier, peft_config, "SEQ_CLS")
    metrics = run_training(ranker, rows, lengths, collate_pairs, config, "reward model", output_dir)
    save_model(trained, tokenizer, output_dir)
    return metrics


def _load_start(
    path: str | Path, lengths: Sequence[int], config: SupervisedConfig
) -> PreTrainedModel:
    """The model that training begins with, once rows of these lengths are known to fit it."""
    policy = load_policy(path)
    require_plain(policy, path)
    _require_fitting(lengths, policy, config)
    return policy


def _recompute_activations(model: PreTrainedModel, config: SupervisedConfig) -> None:
    if config.gradient_checkpointing:
        # The reentrant kind gives no gradient where the inputs need none, as with adapters.
        options = {"use_reentrant": False}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)


def _require_fitting(
    lengths: Sequence[int], model: PreTrainedModel, config: SupervisedConfig
) -> None:
    """Refuse no rows, and rows longer than the settings or the model allow."""
    if not lengths:
        raise DataError("There are no rows to train on: the data set is empty.")
    context = context_length(model.config) or config.max_length
    limit = min(config.max_length, context)
    too_long = [number for number, length in enumerate(lengths) if length > limit]
    if too_long:
        raise DataError(
            f"{len(too_long)} of {len(lengths)} rows are longer than {limit} tokens "
            f"(max_length={config.max_length}, the model's context {context}); the first is row "
            f"{too_long[0]} with {lengths[too_long[0]]}. Shorten or drop them, or raise max_length."
        )


# --- The model of pairs ----------------------------------------------------------


def make_classifier(policy: PreTrainedModel, pad_token_id: int | None) -> PreTrainedModel:
    """A classifier with one output over a copy of the policy's backbone.

    Not `AutoModelForSequenceClassification.from_pretrained`: where a checkpoint keeps tied
    embeddings under the name of the head, that one starts from random embeddings, with a
    line in the log.
    """
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    config.pad_token_id = pad_token_id
    classifier = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
    classifier.base_model.load_state_dict(policy.base_model.state_dict())
    return classifier


class PairRanker(nn.Module):
    """A reward model as it is trained: its forward pass gives the loss of a batch of pairs.

    The score is read at the last counted token, found from the lengths: comparing
    tokens with the pad id would go wrong where a text contains it or pad equals eos.
    """

    def __init__(
        self, classifier: PreTrainedModel, *, centre_rewards_coefficient: float = 0.0
    ) -> None:
        """Take the classifier, which is trained in place, and give it a new head.

        The head's weights are drawn from N(0, 1 / (d + 1)) for a hidden size of d, so
        that scores start near 0 (arXiv:2403.17031).
        """
        super().__init__()
        head = getattr(classifier, "score", None)
        if not isinstance(head, nn.Linear) or classifier.base_model is classifier:
            raise ModelError(
                f"{type(classifier).__name__} is no last-token classifier: it lacks a linear "
                "'score' on top of its backbone. Start from a decoder-only model such as Llama, "
                "GPT-2, GPT-NeoX or Qwen2."
            )
        self.classifier = classifier
        self._centre = centre_rewards_coefficient
        nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))

    def forward(self, input_ids: Tensor, lengths: Tensor, margins: Tensor) -> dict[str, Tensor]:
        """The loss of pairs: input_ids (B, 2, S) and lengths (B, 2), chosen first; margins (B,)."""
        scores = self.score(input_ids.flatten(0, 1), lengths.flatten()).view(-1, 2)
        chosen, rejected = at_least_fp32(scores).unbind(1)
        loss = preference_loss(chosen, rejected, margins)
        return {"loss": loss + self._centre * centring_loss(chosen, rejected)}

    def score(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Scores (N,) of the sequences input_ids (N, S), padded on the right."""
        # A causal row never sees what follows it, so fillers on the right need no mask.
        hidden = self.classifier.base_model(input_ids, use_cache=False).last_hidden_state
        rows = torch.arange(len(lengths), device=input_ids.device)
        scores: Tensor = self.classifier.get_submodule("score")(hidden[rows, lengths - 1])
        return scores.squeeze(-1)


def preference_loss(chosen: Tensor, rejected: Tensor, margins: Tensor | float = 0.0) -> Tensor:
    """Mean of -log sigmoid(chosen - rejected - margin) over pairs, all (B,).

    Without margins it is arXiv:1909.08593, eq. 1; with them arXiv:2307.09288, eq. 2.
    """
    return -logsigmoid(chosen - rejected - margins).mean()


def centring_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Mean of (chosen + rejected)^2 over pairs, (B,) both (arXiv:2312.09244).

    A preference fixes scores only up to a constant; this one pulls their mean to 0.
    """
    return ((chosen + rejected) ** 2).mean()
