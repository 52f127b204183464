"""Load and check policies, reward models and tokenizers from a folder or the hub.

This file loads all models and tokenizers, but not adapters and value heads. It runs no code of a
checkpoint, reads no pickle, and refuses a checkpoint whose tensors do not fit its configuration. A
hub id may name a revision, as in `org/name@REVISION`. Classes that load weights are imported only
where they are used, because checking a configuration or a tokenizer does not need them.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file, extract_commit_hash

from ppo_core.config.hub_ids import MAIN, split_revision
from ppo_core.config.placement import Placement
from ppo_core.config.row_settings import PromptFormat
from ppo_core.data.chat_template import set_prompt_format
from ppo_core.data.text_config import text_config
from ppo_core.errors import ModelError, library_errors
from ppo_core.models.files.model_folder import (
    check_config_keys,
    check_model_folder,
    check_plain_files,
    refuse_adapter,
)
from ppo_core.models.files.tokenizer_checks import (
    TOKENIZER,
    check_tokenizer_file,
    try_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ppo_core.models.reward_model import RewardModel

OTHER_PARTS = ("vision_", "audio_", "multi_modal_projector.")
"""Name prefixes of the tensors of a text-and-image model that are not in its text part."""

NAMED_TENSORS = 3
"""Number of tensors that an error message names."""

MEMBER = "member-"
"""Name prefix of the subfolders in a folder with several reward models."""

# When transformers saves a model, it imports DeepSpeed, which warns on a machine without a GPU.
logging.getLogger("DeepSpeed").addFilter(
    lambda record: not record.getMessage().startswith("Setting accelerator to CPU")
)


def load_tokenizer(
    path: str | Path, prompt_format: PromptFormat = "auto"
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id, and set its prompt format.

    Raises:
        ConfigError: see `set_prompt_format`.
        DataError: see `set_prompt_format`.
        ModelError: the tokenizer cannot be loaded, or a file is refused.
    """
    check_plain_files(path)
    source, revision = split_revision(path)
    with reading("tokenizer", path):
        file = cached_file(
            source, TOKENIZER, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if file is not None:
            check_tokenizer_file(Path(file))
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        try_tokenizer(tokenizer, path)
    set_prompt_format(tokenizer, prompt_format)
    return tokenizer


_NOT_COMPUTED = re.compile(
    "_name_or_path|transformers_version|dtype|torch_dtype|.*_token_id|use_cache"
)
"""Entries of a configuration that no layer reads."""

_OF_THE_HEAD = re.compile("architectures|num_labels|id2label|label2id|problem_type")
"""Entries of a configuration that only the head on the backbone reads."""


def load_config(path: str | Path, revision: str | None = None) -> Any:
    """Return the transformers configuration of a folder or hub id, without loading weights.

    Raises:
        ConfigError: both `path` and `revision` name a revision.
        ModelError: there is no configuration, or the configuration is invalid, belongs to an
            adapter, or requires code outside transformers.
    """
    check_plain_files(path)
    refuse_adapter(path)
    source, revision = split_revision(path, revision)
    with reading("model", path):
        written, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
        check_config_keys(written, path)
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)


def is_same_architecture(model: str | Path, other: str | Path) -> bool:
    """Return whether two models would give equal outputs if their weights were equal.

    Only the configurations are read.

    Raises:
        ModelError: see `load_config`.
    """
    return _computed(model) == _computed(other)


def backbone_differences(model: str | Path, other: str | Path) -> list[str]:
    """Return a text for each setting in which two models' backbones differ; ignore the heads.

    Only the configurations are read.

    Raises:
        ModelError: see `load_config`.
    """
    settings, others = _computed(model), _computed(other)
    names = sorted(name for name in {*settings, *others} if not _OF_THE_HEAD.fullmatch(name))
    return [
        f"{name} is {settings.get(name)!r:.80} and not {others.get(name)!r:.80}"
        for name in names
        if settings.get(name) != others.get(name)
    ]


def _computed(path: str | Path) -> dict[str, Any]:
    entries = load_config(path).to_dict()
    return {k: v for k, v in entries.items() if not _NOT_COMPUTED.fullmatch(k)}


def commit_of(path: str) -> str:
    """Return the commit that a hub id, with or without a revision, refers to.

    Raises:
        ModelError: the hub and its cache have no such model.
    """
    source, revision = split_revision(path)
    with reading("model", path):
        file = cached_file(source, CONFIG_NAME, revision=revision)
        return str(extract_commit_hash(file, None))


def count_parameters(path: str | Path, *, scores: bool = False) -> int:
    """Return the number of parameters of a model, without loading its weights.

    Raises:
        ModelError: see `empty_model`.
    """
    return int(empty_model(path, scores=scores).num_parameters())


def empty_model(path: str | Path, *, scores: bool = False) -> "PreTrainedModel":
    """Return a model on torch's meta device, with shapes but without weights.

    Args:
        path: folder or hub id.
        scores: return a sequence classifier with one label instead of a language model.

    Raises:
        ModelError: there is no configuration, or transformers has no such model.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    config = load_config(path)
    auto_class = text_class(config)
    if scores:
        config.num_labels = 1
        auto_class = AutoModelForSequenceClassification
    with reading("model", path), torch.device("meta"):
        model: PreTrainedModel = auto_class.from_config(config, trust_remote_code=False)
    return model


def load_policy(
    path: str | Path,
    *,
    dtype: Any = "float32",
    placement: Placement | None = None,
    revision: str | None = None,
    **options: Any,
) -> "PreTrainedModel":
    """Return a causal language model in evaluation mode.

    Args:
        path: folder or hub id.
        dtype: precision of the weights; "auto" keeps the files' precision.
        placement: device and precision of a model that is not trained; replaces `dtype`. If None,
            the model stays on the CPU, and the trainer moves it.
        revision: branch, tag or commit of a hub id without `@REVISION`; None means main.
        options: `attn_implementation`, `quantization_config` and `device_map` of transformers.

    Raises:
        ConfigError: both `path` and `revision` name a revision.
        ModelError: the folder or hub id has no causal language model, the model is not
            decoder-only, or a file is refused.
    """
    # Imported here, because it imports torch.
    from ppo_core.models.quantization import is_quantized, keep_differentiable

    check_policy_config(path, revision)
    config = load_config(path, revision)
    # transformers may load only the text part of a text-and-image model.
    unused = OTHER_PARTS if text_config(config) is not config else ()
    dtype = dtype if placement is None else placement.dtype
    options = {"dtype": dtype, "revision": revision, **options}
    with reading("causal language model", path):
        model = load_model(text_class(config), path, options, unused=unused).eval()
    if is_quantized(model):
        keep_differentiable(model)
    return _placed(model, placement)


def _placed(model: "PreTrainedModel", placement: Placement | None) -> "PreTrainedModel":
    return model if placement is None else model.to(placement.device)  # type: ignore[arg-type]


def text_class(config: Any) -> Any:
    """Return the class of transformers that loads the language model of a configuration."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    reads_images_too = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if reads_images_too and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def load_model(
    auto_class: Any, path: str | Path, options: Mapping[str, Any], *, unused: Iterable[str] = ()
) -> "PreTrainedModel":
    """Return the model of a folder or hub id, with every tensor read from its safetensors.

    Args:
        auto_class: class of transformers whose `from_pretrained` loads the model.
        path: folder or hub id.
        options: other arguments of `from_pretrained`.
        unused: name prefixes of tensors that the files may have although the model lacks them.

    Raises:
        ModelError: a file is refused, or tensors are missing or left over.
    """
    options = dict(options)
    if Path(path).is_dir():
        # With `subfolder`, transformers would look for an adapter in the folder above it.
        path = Path(path, options.pop("subfolder", ""))
    check_model_folder(path)
    source, revision = split_revision(path, options.get("revision"))
    model, found = auto_class.from_pretrained(
        source,
        **{**options, "revision": revision},
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    left_over = {name for name in found["unexpected_keys"] if not name.startswith(tuple(unused))}
    for names, state in ((found["missing_keys"], "missing"), (left_over, "left over")):
        if names:
            listed = ", ".join(sorted(names)[:NAMED_TENSORS])
            raise ModelError(
                f"The weights of '{path}' do not fit config.json: {len(names)} tensors of "
                f"{type(model).__name__} are {state}, for example {listed}. A model "
                "with random or unused weights would be trained. Save the model again with "
                "save_pretrained, or correct config.json."
            )
    # An adapter that is added to the model later records this revision of its base.
    model.revision = None if revision == MAIN else revision
    loaded: PreTrainedModel = model
    return loaded


def check_policy_config(path: str | Path, revision: str | None = None) -> None:
    """Raise if a configuration cannot be that of a decoder-only language model.

    Raises:
        ModelError: the model is an encoder, has an encoder, or has a head that scores texts.
    """
    config = load_config(path, revision)
    names = config.architectures or []
    if config.is_encoder_decoder:
        raise ModelError(f"'{path}' has an encoder. Give a decoder-only model as the policy.")
    if any(name.endswith("ForMaskedLM") for name in names):
        raise ModelError(
            f"'{path}' is {', '.join(names)}, an encoder (masked language model), which cannot "
            "generate text. Give a decoder-only model as the policy."
        )
    if any(name.endswith("ForSequenceClassification") for name in names):
        raise ModelError(
            f"'{path}' is {', '.join(names)}, a model that scores, so it has no LM head and would "
            "get a random one. Give a language model as the policy."
        )


def is_classifier(path: str | Path) -> bool:
    """Return whether a folder or hub id has a sequence classifier, such as a reward model.

    Raises:
        ModelError: see `load_config`.
    """
    names = load_config(path).architectures or []
    return any(name.endswith("ForSequenceClassification") for name in names)


def check_reward_config(path: str | Path) -> None:
    """Raise unless a configuration describes a reward model with one score.

    Raises:
        ModelError: the model is not a sequence classifier, is an encoder-decoder, or does not
            have exactly one label.
    """
    config = load_config(path)
    if not is_classifier(path):
        names = ", ".join(config.architectures or []) or "of unknown kind"
        raise ModelError(
            f"'{path}' is {names}, not a "
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
            f"The reward model '{path}' has {config.num_labels} labels, but must have one: its "
            "score. Train a reward model with num_labels=1."
        )


def load_reward_model(
    path: str | Path,
    *,
    bias: float = 0.0,
    gain: float = 1.0,
    end_of_text: bool = True,
    prompt_format: PromptFormat = "auto",
    placement: Placement | None = None,
) -> "RewardModel":
    """Return a `RewardModel`: a tokenizer, and a sequence classifier with one label.

    If `path` is a folder with several models, return a `RewardEnsemble`; see `member_folders`.
    Set `prompt_format` to "text" if the model was trained without its chat template.
    `placement` is as in `load_policy`.

    Raises:
        ModelError: the folder or hub id has no supported sequence classifier with one label, a
            file is refused, or the model's vocabulary is smaller than the tokenizer's.
    """
    from ppo_core.models.reward_model import RewardEnsemble, RewardModel

    load_member = partial(
        load_reward_model,
        bias=bias,
        gain=gain,
        end_of_text=end_of_text,
        prompt_format=prompt_format,
        placement=placement,
    )
    if folders := member_folders(path):
        return RewardEnsemble([load_member(one) for one in folders])
    model = load_classifier(path, placement=placement)
    tokenizer = load_tokenizer(path, prompt_format)
    check_vocabulary(model.config, tokenizer, path)
    return RewardModel(model, tokenizer, bias=bias, gain=gain, end_of_text=end_of_text)


def load_classifier(path: str | Path, *, placement: Placement | None = None) -> "PreTrainedModel":
    """Return the sequence classifier of a reward model, in evaluation mode.

    `placement` is as in `load_policy`.

    Raises:
        ModelError: see `check_reward_config`; or a file is refused.
    """
    from transformers import AutoModelForSequenceClassification

    check_reward_config(path)
    with reading("reward model", path):
        options = {"dtype": "float32" if placement is None else placement.dtype}
        model = load_model(AutoModelForSequenceClassification, path, options)
    return _placed(model, placement).eval()


def member_folders(path: str | Path) -> list[Path]:
    """Return the subfolders member-1 to member-N of a folder with reward models; [] for one model.

    Raises:
        ModelError: a number is missing.
    """
    is_model = (Path(path) / "config.json").exists()
    found = [] if is_model else Path(path).glob(f"{MEMBER}*")
    numbers = sorted(
        int(number) for one in found if (number := one.name.removeprefix(MEMBER)).isdecimal()
    )
    if numbers != [*range(1, len(numbers) + 1)]:
        raise ModelError(
            f"'{path}' has the members {numbers} of a reward model, but others are missing: "
            "members are numbered from 1 without a gap. Copy the whole folder again."
        )
    return [Path(path) / f"{MEMBER}{number}" for number in numbers]


def check_vocabulary(config: Any, tokenizer: PreTrainedTokenizerBase, path: str | Path) -> None:
    """Raise if the tokenizer can return ids for which the model has no embedding.

    Raises:
        ModelError: the model's vocabulary is smaller than the tokenizer's.
    """
    size = text_config(config).vocab_size
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= size:
        raise ModelError(
            f"The tokenizer has ids up to {largest}, but the model '{path}' has embeddings only "
            f"for ids below {size} (vocab_size), so some texts could not be read. Call "
            "model.resize_token_embeddings(len(tokenizer)) and save the model, or use the "
            "tokenizer that the model was trained with."
        )


def reading(what: str, path: str | Path) -> AbstractContextManager[None]:
    """Return a context that turns every error into a ModelError that names the folder or hub id."""
    is_local = Path(path).is_dir()
    missing = f"There is no folder '{Path(path).absolute()!s:.300}', so it is read as a hub id. "
    return library_errors(
        ModelError,
        f"No {what} can be loaded from '{path}'",
        f"{'' if is_local else missing}Check the path or hub id, and that the files were written "
        "by save_pretrained.",
    )
