"""Models and tokenizers from a folder or the hub, refused where they cannot play their part.

What loads weights is imported when it is needed: to check a configuration or a tokenizer takes
half of it.
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
    """The tokenizer of a folder or hub id.

    Raises:
        ModelError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"No tokenizer can be loaded from '{path}': {error}") from error


def load_config(path: str | Path) -> Any:
    """The transformers configuration of a folder or hub id, without its weights.

    Raises:
        ModelError: there is none, or only code that is not part of transformers can read it.
    """
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"No model can be loaded from '{path}': {error}") from error


def load_policy(path: str | Path) -> "PreTrainedModel":
    """A causal language model in fp32, ready to be sampled from.

    Raises:
        ModelError: there is none at this folder or hub id, or it is not decoder-only.
    """
    from transformers import AutoModelForCausalLM

    config = load_config(path)
    if config.is_encoder_decoder:
        raise ModelError(f"'{path}' has an encoder; the policy must be a decoder-only model.")
    if any(name.endswith("ForSequenceClassification") for name in config.architectures or []):
        raise ModelError(
            f"'{path}' is {', '.join(config.architectures)}, a model that scores: its language "
            "head would start random. Name the language model."
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"No causal language model can be loaded from '{path}': {error}"
        ) from error
    return model.eval()


def check_reward_config(path: str | Path) -> None:
    """Refuse a reward model that does not give one score, by its configuration alone.

    Raises:
        ModelError: it has more or fewer than one label, an encoder and a decoder, or is no sequence
            classifier.
    """
    config = load_config(path)
    architectures = config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        raise ModelError(
            f"'{path}' is {', '.join(architectures) or 'of unknown kind'}, not a "
            "...ForSequenceClassification: its head would start random and its scores mean "
            "nothing. Train a reward model from it with --preferences."
        )
    if config.is_encoder_decoder:
        raise ModelError(
            f"The reward model '{path}' has an encoder and a decoder, which read one text twice. "
            "Use a decoder-only or an encoder-only model."
        )
    if config.num_labels != 1:
        raise ModelError(
            f"The reward model '{path}' has {config.num_labels} labels; a reward model has one, "
            "its score. Train one with num_labels=1."
        )


def load_reward_model(
    path: str | Path, *, bias: float = 0.0, gain: float = 1.0, end_of_text: bool = True
) -> "RewardModel":
    """A sequence classifier with one label and its own tokenizer, as `RewardModel` has them.

    Raises:
        ModelError: there is none at this folder or hub id, or it does not give one score.
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
