"""Load and check policies, reward models and tokenizers from a folder or the hub.

Classes that load weights are imported only where they are used: checking a configuration or a
tokenizer does not need them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from ppo_core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ppo_core.models.reward_model import RewardModel


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub id.

    Raises:
        ModelError: the tokenizer cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"No tokenizer can be loaded from '{path}': {error}") from error


def load_config(path: str | Path) -> Any:
    """Return the transformers configuration of a folder or hub id, without loading weights.

    Raises:
        ModelError: there is no configuration, or it requires code outside transformers.
    """
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"No model can be loaded from '{path}': {error}") from error


def load_policy(path: str | Path) -> "PreTrainedModel":
    """Return a causal language model in fp32 and evaluation mode.

    Raises:
        ModelError: the folder or hub id has no causal language model, or it is not decoder-only.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    if config.is_encoder_decoder:
        raise ModelError(f"'{path}' has an encoder. Give a decoder-only model as the policy.")
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
        raise ModelError(
            f"'{path}' is {', '.join(config.architectures)}, a model that scores, so it has no LM "
            "head and would get a random one. Give a language model as the policy."
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"No causal language model can be loaded from '{path}': {error}"
        ) from error
    return model.eval()


def check_reward_config(path: str | Path) -> None:
    """Raise unless a model's configuration is that of a reward model with one score.

    Raises:
        ModelError: the model is not a sequence classifier, is an encoder-decoder, or has not
            exactly one label.
    """
    config = load_config(path)
    architectures = config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ModelError(
            f"'{path}' is {', '.join(architectures) or 'of unknown kind'}, not a "
            "...ForSequenceClassification. Its head would be random, and its scores meaningless. "
            "Train a reward model from this model with --preferences."
        )
    if config.is_encoder_decoder:
        raise ModelError(
            f"The reward model '{path}' has an encoder and a decoder, which is not supported. Use "
            "a decoder-only or an encoder-only model."
        )
    if config.num_labels != 1:
        raise ModelError(
            f"The reward model '{path}' has {config.num_labels} labels, and must have one: its "
            "score. Train a reward model with num_labels=1."
        )


def load_reward_model(
    path: str | Path, *, bias: float = 0.0, gain: float = 1.0, end_of_text: bool = True
) -> "RewardModel":
    """Return a `RewardModel` of a sequence classifier with one label and of its tokenizer.

    Raises:
        ModelError: the folder or hub id has no supported sequence classifier with one label.
    """
    from transformers import AutoModelForSequenceClassification

    from ppo_core.models.reward_model import RewardModel

    check_reward_config(path)
    try:
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype="float32")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"No reward model can be loaded from '{path}': {error}") from error
    tokenizer = load_tokenizer(path)
    return RewardModel(model.eval(), tokenizer, bias=bias, gain=gain, end_of_text=end_of_text)
