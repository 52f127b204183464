"""The command line of `python -m ppo_core.supervised sft|reward`."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core.config.argument_parser import DocumentedParser
from ppo_core.config.field_checks import check_fields
from ppo_core.config.row_settings import (
    MAX_LEFT_OUT,
    Overlong,
    PromptFormat,
    ReadOptions,
    parse_columns,
)
from ppo_core.config.script_arguments import LoraArguments
from ppo_core.config.trl_names import SUPERVISED_ALIASES, supervised_instead
from ppo_core.distributed.choose_sharding import SHARD_WEIGHTS
from ppo_core.distributed.interruption import EXIT_CODE
from ppo_core.distributed.process import is_main_process, large_imports, reported_errors
from ppo_core.errors import ConfigError, PPOError, RunInterruptedError
from ppo_core.io.atomic_files import explained_full_disk
from ppo_core.io.validation import ShareBelow1
from ppo_core.models.kernels.cpu_memory import keep_few_compiled_matmuls, prepare_cpu_process
from ppo_core.supervised.job import run_job
from ppo_core.supervised.supervised_config import SupervisedConfig

if TYPE_CHECKING:
    from ppo_core.supervised.examples.encoded_rows import TrainingKind

TRAININGS = ("sft", "reward")


@dataclass(frozen=True, kw_only=True)
class SupervisedArguments:
    """The model to start from, the data, and the folder for the trained model."""

    model_name_or_path: str
    """Folder or hub id of the model to start from; a hub id may name a revision, as in
    `org/name@revision`."""

    dataset_name: str
    """A .jsonl, .json, .csv, .tsv or .parquet file (.gz and .pq too), a folder, or a hub id.
    To select a split other than `train`, append the split to the folder or hub id with a colon, as
    in `org/name:test`; a hub id may also name a revision and a configuration, as in
    `org/name@revision:config/test`."""

    columns: list[str] | None = None
    """FIELD=COLUMN for columns with other names, as in `prompt=post chosen=better`."""

    prompt_format: PromptFormat = "auto"
    """How the model reads prompts: `chat` (in the tokenizer's chat template), `text` (as they are),
    or `auto` (`chat` if the tokenizer has a template)."""

    overlong: Overlong = "drop"
    """What happens to a row with more than max_length tokens: `error`, `drop` (see
    `max_left_out`), or `truncate`, which removes the start of the prompt."""

    max_left_out: ShareBelow1 = MAX_LEFT_OUT
    """Maximum fraction of the rows of a data set that may be left out, because they cannot be used
    or are too long; if more are left out, the command stops. 0 allows none."""

    allow_data_urls: bool = False
    """Allow dataset_name to be the address of a data file, such as https://..."""

    output_dir: str
    """Folder for the trained model and its tokenizer, metrics.jsonl, and checkpoints."""

    resume_from_checkpoint: str | None = None
    """Folder of the checkpoint to resume from; `latest` takes the newest checkpoint in output_dir,
    or starts anew if there is none."""

    resume_anyway: bool = False
    """Only warn, instead of failing, if the checkpoint was written with other settings, data or
    model."""

    def __post_init__(self) -> None:
        """Check the values before anything is loaded."""
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class SupervisedLoraArguments(LoraArguments):
    """LoRA settings of supervised training."""

    lora_dropout: float = 0.05
    """Dropout probability at the input of the adapters."""


def main(argv: Sequence[str]) -> int:
    """Train and print the metrics; on an error print one line to stderr. Return the exit code.

    If the only argument is the file of a `SupervisedJob`, the metrics are written to a file. The
    exit code is 75 after SIGTERM: the training can then resume, if it writes checkpoints.
    """
    try:
        with reported_errors(), explained_full_disk():
            if len(argv) == 1 and argv[0].endswith(".json"):
                _hide_library_output()
                run_job(Path(argv[0]), prepare_process)
                return 0
            metrics = train_supervised(argv)
            if is_main_process():
                print(json.dumps(metrics))
    except RunInterruptedError as error:
        print(f"ppo_core.supervised: {error}", file=sys.stderr)
        return EXIT_CODE
    except PPOError as error:
        print(f"ppo_core.supervised: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def prepare_process(sharding: str | None, *, trains_adapter: bool) -> None:
    """Limit the memory of a training process; call this before the first matmul of the process.

    Without a GPU, freed memory is also reused, see `prepare_cpu_process`.
    """
    with large_imports():
        import torch

    if torch.cuda.is_available():
        keep_few_compiled_matmuls()
    else:
        prepare_cpu_process(shards_weights=sharding in SHARD_WEIGHTS, trains_adapter=trains_adapter)


def train_supervised(argv: Sequence[str]) -> dict[str, float]:
    """Run the training that the first argument names, with the flags that follow.

    Return the metrics of the training.

    Raises:
        ConfigError: the first argument, a flag or a value is not valid.
        DataError: the rows cannot be used.
        ModelError: the model or its tokenizer cannot be loaded or used.
        RunInterruptedError: SIGTERM stopped the training.
        TrainingError: the loss is not finite, memory is full, or a checkpoint does not fit.
        SystemExit: the flag --help was given; the help is printed first.
    """
    kind, *flags = argv or [""]
    if kind not in TRAININGS and kind not in ("-h", "--help"):
        raise ConfigError(
            f"{kind!r} is not a training. Begin with {' or '.join(TRAININGS)}, followed by flags. "
            f"--help lists the flags."
        )
    arguments, config, lora = parse_supervised(kind, flags if kind in TRAININGS else ["--help"])
    prepare_process(config.sharding, trains_adapter=lora.use_peft)
    # Imported here: --help and a wrong flag need no torch.
    with large_imports():
        from ppo_core.data.rows.describe import (
            describe_first,
            describe_reading,
            require_columns_read,
        )
        from ppo_core.data.rows.read_rows import read_rows
        from ppo_core.models.loading import load_tokenizer
        from ppo_core.supervised.examples.encoded_rows import encode_rows, max_tokens
        from ppo_core.supervised.training import (
            refuse_other_settings,
            train_reward_model,
            train_sft,
        )

    train = train_sft if kind == "sft" else train_reward_model
    rows_kind: TrainingKind = "demonstrations" if kind == "sft" else "pairs"
    refuse_other_settings(rows_kind, config)
    renamed = parse_columns(arguments.columns)
    _hide_library_output()
    tokenizer = load_tokenizer(arguments.model_name_or_path, arguments.prompt_format)
    rows = read_rows(
        arguments.dataset_name,
        rows_kind,
        is_chat=tokenizer.chat_template is not None,
        options=ReadOptions(renamed, arguments.allow_data_urls, arguments.max_left_out),
    )
    require_columns_read(renamed, rows)
    # The training takes these encoded rows from the cache.
    encoded = encode_rows(
        rows_kind,
        rows,
        tokenizer,
        config,
        limit=max_tokens(arguments.model_name_or_path, config),
        overlong=arguments.overlong,
    )
    if is_main_process():
        print(describe_reading(encoded), file=sys.stderr)
        ids = encoded.table[0]["input_ids" if kind == "sft" else "chosen"]
        print(describe_first(tokenizer, ids), file=sys.stderr)
    resume = arguments.resume_from_checkpoint
    return train(
        arguments.model_name_or_path,
        rows,
        config,
        arguments.output_dir,
        prompt_format=arguments.prompt_format,
        overlong=arguments.overlong,
        peft_config=_lora_config(lora) if lora.use_peft else None,
        resume=True if resume == "latest" else resume,
        resume_anyway=arguments.resume_anyway,
    )


def parse_supervised(
    kind: str, flags: Sequence[str]
) -> tuple[SupervisedArguments, SupervisedConfig, SupervisedLoraArguments]:
    """Return the settings that the flags of a training specify.

    Args:
        kind: `sft` or `reward`; for any other text, the help names both.
        flags: arguments after the kind.

    Raises:
        ConfigError: a flag is unknown, missing or not supported, or a value is not valid.
        SystemExit: the flag --help was given; the help is printed first.
    """
    saves = any(re.match("--save[-_]steps(=|$)", flag) for flag in flags)
    parser = DocumentedParser(
        [SupervisedArguments, SupervisedConfig, SupervisedLoraArguments],
        prog="python -m ppo_core.supervised",
        usage=f"%(prog)s {kind if kind in TRAININGS else '|'.join(TRAININGS)} [--name value]",
        aliases=SUPERVISED_ALIASES,
        instead=supervised_instead(kind, saves=saves),
    )
    arguments, config, lora = parser.parse(flags)
    return arguments, config, lora


def _lora_config(lora: SupervisedLoraArguments) -> Any:
    from ppo_core.models.adapters import lora_config

    return lora_config(
        r=lora.lora_r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=lora.lora_target_modules,
    )


def _hide_library_output() -> None:
    """Hide the libraries' messages, so that stderr shows only progress and errors."""
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    logging.disable_progress_bar()
