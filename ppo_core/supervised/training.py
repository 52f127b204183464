"""SFT and reward-model training, in one process or several.

To train from a shell, see `python -m ppo_core.supervised sft|reward --help`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.checkpointing.checkpointer import refuse_earlier_run
from ppo_core.config.placement import is_fast_in_bf16
from ppo_core.config.row_settings import Overlong, PromptFormat
from ppo_core.config.sized_defaults import sized_defaults
from ppo_core.data.model_files import ADAPTER, replaced_together, save_tokenizer
from ppo_core.data.rows.read_rows import Rows, read_source
from ppo_core.data.sources.source import source_of_rows
from ppo_core.data.text_config import text_config
from ppo_core.distributed.choose_engine import choose_engine
from ppo_core.distributed.engine import Engine
from ppo_core.distributed.gather_weights import gather_weights, save_plain
from ppo_core.errors import ConfigError
from ppo_core.io.atomic_files import require_writable
from ppo_core.io.random_state import seed_global_generators
from ppo_core.models.adapters import adapter_settings, recompute_activations
from ppo_core.models.files.adapter_weights import save_adapter
from ppo_core.models.files.model_folder import refuse_adapter
from ppo_core.models.loading import (
    count_parameters,
    is_classifier,
    load_classifier,
    load_config,
    load_policy,
    load_tokenizer,
)
from ppo_core.supervised.examples.encoded_rows import TrainingKind, encode_rows, max_tokens
from ppo_core.supervised.examples.reward_pairs import collate_pairs
from ppo_core.supervised.examples.sft_examples import collate_examples
from ppo_core.supervised.learning_rate_search import find_learning_rate
from ppo_core.supervised.lora import add_task_adapter, exact_weights, require_plain
from ppo_core.supervised.next_token_loss import NextTokenLoss
from ppo_core.supervised.pair_ranker import PairRanker, make_classifier
from ppo_core.supervised.supervised_config import RATE_FILE, SupervisedConfig
from ppo_core.supervised.training_loop import TIMEOUT, TrainingData, TrainingLoop

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


def train_sft(
    model: str | Path,
    examples: Rows | Sequence[Mapping[str, Any]],
    config: SupervisedConfig,
    output_dir: str | Path,
    *,
    prompt_format: PromptFormat = "auto",
    overlong: Overlong = "drop",
    peft_config: "PeftConfig | None" = None,
    resume: str | Path | bool | None = None,
    resume_anyway: bool = False,
    model_dir: str | Path | None = None,
) -> dict[str, float]:
    """Fine-tune a causal language model on demonstrations.

    The loss of an optimizer step is the mean over all its tokens whose labels are not ignored. The
    trained model and its tokenizer are saved. Call this function in every process of torchrun or
    `accelerate launch`.

    Args:
        model: folder or hub id of the model to start from.
        examples: demonstrations from `read_rows`, or rows in a form that `read_rows` reads.
        config: the settings.
        output_dir: folder for the trained model, metrics.jsonl, and checkpoints.
        prompt_format: whether prompts are a chat, see `set_prompt_format`.
        overlong: what happens to a row with more tokens than `max_length` or the model's context.
        peft_config: a `peft.LoraConfig` (arXiv:2106.09685), to train adapters instead of all
            weights. The adapters are merged into the saved model, and also saved in `adapter/`.
        resume: folder of a checkpoint; True for the newest undamaged checkpoint in `output_dir`, if
            there is one; None or False to start anew.
        resume_anyway: only warn if the checkpoint was written with other settings, data or model.
        model_dir: folder for the trained model; None for `output_dir`.

    Returns:
        Metrics: "loss" (mean over the last tenth of the run), "rows", "steps" (optimizer steps),
        "seconds" and "learning_rate".

    Raises:
        ConfigError: a setting is for reward models, the peft_config cannot be used, or output_dir
            has checkpoints of an earlier training although `resume` is off.
        DataError: there are no rows, or too many of them cannot be used or are too long.
        ModelError: the model cannot be loaded, or already has adapters.
        RunInterruptedError: SIGTERM stopped the training; it can resume from its checkpoint.
        TrainingError: the loss is not finite, memory is full, or the checkpoint does not fit.
    """
    refuse_other_settings("demonstrations", config)
    output, saved = _make_folders(output_dir, model_dir)
    tokenizer, data = _read_data(model, examples, "demonstrations", config, prompt_format, overlong)
    seed_global_generators(config.seed)
    policy = _load_start(model)
    if config.learning_rate is None:
        sized = sized_defaults(policy.num_parameters(), lora=peft_config is not None)
        config = replace(config, learning_rate=sized.sft_learning_rate)
    _checkpoint_activations(policy, config)
    adapted = None if peft_config is None else add_task_adapter(policy, peft_config, "CAUSAL_LM")
    engine = connect_processes(config, model)
    module = NextTokenLoss(adapted or policy)
    loop = TrainingLoop(
        module, data, config, "SFT", adapted=adapted, engine=engine, output_dir=output
    )
    metrics = loop.train(resume, anyway=resume_anyway)
    _save(policy, adapted, tokenizer, engine, saved, start=model)
    return metrics


def train_reward_model(
    model: str | Path,
    pairs: Rows | Sequence[Mapping[str, Any]],
    config: SupervisedConfig,
    output_dir: str | Path,
    *,
    prompt_format: PromptFormat = "auto",
    overlong: Overlong = "drop",
    peft_config: "PeftConfig | None" = None,
    resume: str | Path | bool | None = None,
    resume_anyway: bool = False,
    model_dir: str | Path | None = None,
) -> dict[str, float]:
    """Train a reward model to score chosen responses above rejected responses.

    A language model gets a new score head, which is applied to the last token; the training of a
    reward model continues with its own head. The trained model and its tokenizer are saved. Call
    this function in every process, like `train_sft`.

    Args:
        model: folder or hub id of a decoder-only model, for example the SFT policy, or of a reward
            model with one label.
        pairs: preferences from `read_rows`, or rows in a form that `read_rows` reads.
        config: the settings.
        output_dir: folder for the trained model, metrics.jsonl, and checkpoints.
        prompt_format: as in `train_sft`.
        overlong: as in `train_sft`.
        peft_config: as in `train_sft`; the score head is trained in full, without an adapter.
        resume: as in `train_sft`.
        resume_anyway: as in `train_sft`.
        model_dir: as in `train_sft`.

    Returns:
        The metrics of `train_sft`. If the learning rate was searched, also the loss on other pairs
        for each rate, named for example "loss_at_1.0e-05".

    Raises:
        ConfigError: a setting is for SFT, the peft_config cannot be used, output_dir has
            checkpoints of an earlier training although `resume` is off, or the learning rate would
            be searched with sharded states.
        DataError: there are no rows, too many of them cannot be used or are too long, or there are
            too few to search the learning rate.
        ModelError: the model cannot be loaded, already has adapters, or its architecture has no
            last-token classifier.
        RunInterruptedError: SIGTERM stopped the training; it can resume from its checkpoint.
        TrainingError: the loss is not finite, memory is full, or the checkpoint does not fit.
    """
    refuse_other_settings("pairs", config)
    output, saved = _make_folders(output_dir, model_dir)
    tokenizer, data = _read_data(model, pairs, "pairs", config, prompt_format, overlong)
    make = partial(_make_ranker, model, tokenizer.pad_token_id, config, peft_config)
    engine = connect_processes(config, model)
    tried: dict[str, float] = {}
    if config.learning_rate in (None, "auto"):
        sized = sized_defaults(count_parameters(model, scores=True), lora=peft_config is not None)
        rate = sized.reward_learning_rate
        if config.learning_rate == "auto":
            if config.save_steps and not resume:
                engine.peers.together(lambda: refuse_earlier_run(output))
            rate, tried = find_learning_rate(
                make,
                data,
                config,
                rate,
                engine,
                model=_start_and_adapter(model, peft_config),
                file=output / RATE_FILE,
                earlier=_earlier_search(resume, output),
            )
        config = replace(config, learning_rate=rate)
    ranker, adapted = make()
    loop = TrainingLoop(
        ranker, data, config, "reward model", adapted=adapted, engine=engine, output_dir=output
    )
    metrics = loop.train(resume, anyway=resume_anyway)
    _save(ranker.classifier, adapted, tokenizer, engine, saved, start=model)
    return metrics | tried


def _make_folders(output_dir: str | Path, model_dir: str | Path | None) -> tuple[Path, Path]:
    """Create the folders of the training and of the trained model."""
    output = Path(output_dir)
    saved = Path(model_dir or output)
    require_writable(output, "output_dir")
    require_writable(saved, "model_dir" if model_dir else "output_dir")
    return output, saved


def _read_data(
    model: str | Path,
    given: Rows | Sequence[Mapping[str, Any]],
    kind: TrainingKind,
    config: SupervisedConfig,
    prompt_format: PromptFormat,
    overlong: Overlong,
) -> tuple[PreTrainedTokenizerBase, TrainingData]:
    """Return the tokenizer of a model, and the encoded rows of its training."""
    refuse_adapter(model)
    tokenizer = load_tokenizer(model, prompt_format)
    rows = given
    if not isinstance(rows, Rows):
        is_chat = tokenizer.chat_template is not None
        rows = read_source(source_of_rows(rows), kind, is_chat=is_chat)
    limit = max_tokens(model, config)
    encoded = encode_rows(kind, rows, tokenizer, config, limit=limit, overlong=overlong)
    is_pair = kind == "pairs"
    data = TrainingData(
        rows=encoded.table,
        digest=encoded.digest,
        collate=collate_pairs if is_pair else collate_examples,
        texts_per_row=2 if is_pair else 1,
    )
    return tokenizer, data


def _start_and_adapter(model: str | Path, peft_config: "PeftConfig | None") -> dict[str, str]:
    """Return a description of the model to train and of its adapter, as JSON-compatible texts."""
    adapter = {} if peft_config is None else adapter_settings(peft_config)
    return {"start": str(model)} | adapter


def _earlier_search(resume: str | Path | bool | None, output: Path) -> Path | None:
    """Return the result file of the search that preceded the checkpoint to resume from, or None."""
    if resume is True:
        return output / RATE_FILE
    return Path(resume).parent / RATE_FILE if resume else None


def _make_ranker(
    model: str | Path,
    pad_token_id: int | None,
    config: SupervisedConfig,
    peft_config: "PeftConfig | None",
) -> tuple[PairRanker, "PeftModel | None"]:
    """Return the reward model before its training, and the PeftModel in it if there is one."""
    seed_global_generators(config.seed)
    continues = is_classifier(model)
    if continues:
        classifier = load_classifier(model)
        require_plain(classifier, model)
    else:
        classifier = make_classifier(_load_start(model), pad_token_id)
    _checkpoint_activations(classifier, config)
    ranker = PairRanker(
        classifier,
        center_rewards_coefficient=config.center_rewards_coefficient,
        keeps_head=continues,
    )
    if peft_config is None:
        return ranker, None
    # This adds the adapters in place, so the ranker uses them as well.
    return ranker, add_task_adapter(classifier, peft_config, "SEQ_CLS")


def connect_processes(config: SupervisedConfig, model: str | Path) -> Engine:
    """Connect this process to the other processes of a training.

    If `config.bf16` is None, the launcher, the machine and the hidden size of `model` determine the
    precision.

    Raises:
        ConfigError: settings of the sharding contradict each other or the launcher's.
    """
    in_bf16 = config.bf16
    if in_bf16 is None:
        width = getattr(text_config(load_config(model)), "hidden_size", 0)
        in_bf16 = is_fast_in_bf16(width, use_cpu=False) or None
    return choose_engine(
        bf16=in_bf16, sharding=config.sharding, offload=config.offload, timeout=TIMEOUT
    )


def _save(
    model: PreTrainedModel,
    adapted: "PeftModel | None",
    tokenizer: PreTrainedTokenizerBase,
    engine: Engine,
    folder: Path,
    *,
    start: str | Path,
) -> None:
    """Write the trained model and its tokenizer completely or not at all.

    All processes must call this function. An adapter is saved separately, and also merged into the
    written model. `start` is the folder or hub id of the model before its training.

    Raises:
        ModelError: an adapter cannot be merged, because the files of `start` have changed.
        TrainingError: a file cannot be written, for example because the disk is full.
    """
    weights = gather_weights(engine, model, adapted)
    if not engine.is_main:
        return
    if adapted is not None and weights is None:
        weights = exact_weights(adapted, start)
    with replaced_together(folder) as unfinished:
        if adapted is not None:
            save_adapter(adapted, unfinished / ADAPTER, weights=weights)
        save_plain(model, adapted, unfinished, weights)
        save_tokenizer(tokenizer, unfinished)


def refuse_other_settings(kind: TrainingKind, config: SupervisedConfig) -> None:
    """Raise if a setting has no effect on a training with rows of this kind.

    Raises:
        ConfigError: there is such a setting.
    """
    of_rewards = ("center_rewards_coefficient", "repeated_text_pairs", "other_prompt_pairs")
    for name in of_rewards if kind == "demonstrations" else ():
        if value := getattr(config, name):
            raise ConfigError(
                f"{name}={value} is for reward models, because SFT has no scores. Remove {name}."
            )
    if kind == "demonstrations" and config.learning_rate == "auto":
        raise ConfigError(
            "learning_rate='auto' is for reward models. Set learning_rate to a number, or leave it "
            "out for a rate by the size of the model."
        )
    if kind == "pairs" and not config.completion_only_loss:
        raise ConfigError(
            "completion_only_loss=False is for SFT, because a reward model is trained on the "
            "scores of full texts. Remove completion_only_loss."
        )


def _load_start(path: str | Path) -> PreTrainedModel:
    """Load the model to start from; raise if it has adapters."""
    policy = load_policy(path)
    require_plain(policy, path)
    return policy


def _checkpoint_activations(model: PreTrainedModel, config: SupervisedConfig) -> None:
    if config.gradient_checkpointing:
        # With adapters, the inputs of the layers require no gradient. Reentrant checkpointing would
        # then compute no gradients at all.
        recompute_activations(model, {"use_reentrant": False})
