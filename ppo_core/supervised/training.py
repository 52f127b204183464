"""SFT and reward-model training with transformers.Trainer.

To train from a shell, see `python -m ppo_core.supervised sft|reward --help`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, set_seed

from ppo_core.data.prompts import context_length
from ppo_core.errors import ConfigError, DataError
from ppo_core.models.files.model_folder import refuse_adapter
from ppo_core.models.loading import load_policy, load_tokenizer
from ppo_core.supervised.lora import add_task_adapter, require_plain
from ppo_core.supervised.pair_ranker import PairRanker, make_classifier
from ppo_core.supervised.reward_pairs import collate_pairs, encode_pair
from ppo_core.supervised.sft_examples import collate_examples, encode_example
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.supervised.training_loop import run_training, save_model

if TYPE_CHECKING:
    from peft import PeftConfig


def train_sft(
    model: str | Path,
    examples: Sequence[Mapping[str, Any]],
    config: SupervisedConfig,
    output_dir: str | Path,
    *,
    peft_config: "PeftConfig | None" = None,
) -> dict[str, float]:
    """Fine-tune a causal language model on demonstrations.

    The loss is the mean over those tokens of an optimizer step whose label is not ignored. The
    trained model and its tokenizer are saved in `output_dir`.

    Args:
        model: folder or hub id of the model to start from.
        examples: rows in a form that `encode_example` accepts.
        config: the settings.
        output_dir: folder for the trained model.
        peft_config: a `peft.LoraConfig` (arXiv:2106.09685), to train adapters instead of all
            weights. The adapters are merged into the saved model, and also saved in `adapter/`.

    Returns:
        Metrics: "loss" (mean over the last tenth of the run), "rows", "steps" (optimizer steps)
        and "seconds".

    Raises:
        ConfigError: a setting is for reward models, or the peft_config cannot be used.
        DataError: there are no rows, or a row cannot be used, is empty or too long.
        ModelError: the model cannot be loaded, or already has adapters.
        TrainingError: the loss is not finite.
    """
    if config.centre_rewards_coefficient:
        raise ConfigError(
            f"centre_rewards_coefficient={config.centre_rewards_coefficient} is for reward models, "
            "because SFT has no scores. Remove centre_rewards_coefficient."
        )
    refuse_adapter(model)
    tokenizer = load_tokenizer(model)
    rows = [encode_example(tokenizer, row, number, config) for number, row in enumerate(examples)]
    lengths = [len(row["input_ids"]) for row in rows]
    set_seed(config.seed)
    policy = _load_start(model, lengths, config)
    _checkpoint_activations(policy, config)
    trained = policy if peft_config is None else add_task_adapter(policy, peft_config, "CAUSAL_LM")
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
    """Train a reward model to score chosen responses above rejected responses.

    The model gets a new score head, which is applied to the last token. The trained model and its
    tokenizer are saved in `output_dir`.

    Args:
        model: folder or hub id of a decoder-only model, for example the SFT policy.
        pairs: rows in a form that `encode_pair` accepts.
        config: the settings.
        output_dir: folder for the trained model.
        peft_config: as in `train_sft`; the score head is trained in full, without an adapter.

    Returns:
        Metrics: "loss" (mean over the last tenth of the run), "rows", "steps" (optimizer steps)
        and "seconds".

    Raises:
        ConfigError: a setting is for SFT, or the peft_config cannot be used.
        DataError: there are no rows, or a row cannot be used, is empty or too long.
        ModelError: the model cannot be loaded, already has adapters, or its architecture has no
            last-token classifier.
        TrainingError: the loss is not finite.
    """
    if not config.completion_only_loss:
        raise ConfigError(
            "completion_only_loss=False is for SFT, because a reward model is trained on the "
            "scores of full texts. Remove completion_only_loss."
        )
    refuse_adapter(model)
    tokenizer = load_tokenizer(model)
    rows = [encode_pair(tokenizer, row, number, config) for number, row in enumerate(pairs)]
    lengths = [max(len(row["chosen"]), len(row["rejected"])) for row in rows]
    set_seed(config.seed)
    policy = _load_start(model, lengths, config)
    classifier = make_classifier(policy, tokenizer.pad_token_id)
    _checkpoint_activations(classifier, config)
    ranker = PairRanker(classifier, centre_rewards_coefficient=config.centre_rewards_coefficient)
    # This adds the adapters in place, so the ranker uses them as well.
    trained = (
        classifier if peft_config is None else add_task_adapter(classifier, peft_config, "SEQ_CLS")
    )
    metrics = run_training(ranker, rows, lengths, collate_pairs, config, "reward model", output_dir)
    save_model(trained, tokenizer, output_dir)
    return metrics


def _load_start(
    path: str | Path, lengths: Sequence[int], config: SupervisedConfig
) -> PreTrainedModel:
    """Load the model to start from; raise if it has adapters, or rows are too long for it."""
    policy = load_policy(path)
    require_plain(policy, path)
    _check_lengths(lengths, policy, config)
    return policy


def _checkpoint_activations(model: PreTrainedModel, config: SupervisedConfig) -> None:
    if config.gradient_checkpointing:
        # With adapters the inputs need no gradient, and reentrant checkpointing would then compute
        # no gradients at all.
        options = {"use_reentrant": False}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)


def _check_lengths(
    lengths: Sequence[int], model: PreTrainedModel, config: SupervisedConfig
) -> None:
    """Raise DataError if there are no rows, or a row is too long for the settings or the model."""
    if not lengths:
        raise DataError("There are no rows to train on, because the data set is empty.")
    context = context_length(model.config) or config.max_length
    limit = min(config.max_length, context)
    too_long = [number for number, length in enumerate(lengths) if length > limit]
    if too_long:
        raise DataError(
            f"{len(too_long)} of {len(lengths)} rows are longer than {limit} tokens "
            f"(max_length={config.max_length}, the model's context {context}). The first is row "
            f"{too_long[0]} with {lengths[too_long[0]]} tokens. Shorten or drop these rows, or "
            "raise max_length up to the model's context."
        )
