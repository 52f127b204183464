"""Check the inputs of a run before anything is trained."""

import os
from pathlib import Path

from pipeline.evaluation.canaries import require_references
from pipeline.inputs import data_sets
from pipeline.inputs.preference_pairs import label_pairs
from pipeline.inputs.rows import Rows, write_jsonl
from pipeline.judges.spec import check_judge
from pipeline.settings.settings import Settings
from ppo_core.data.prompts import (
    check_prompt_lengths,
    context_length,
    encode_dialogue,
    encode_prompt,
    encode_response,
)
from ppo_core.errors import ConfigError, DataError, ModelError, reason_of
from ppo_core.models.files.model_folder import check_model_folder
from ppo_core.models.loading import (
    check_reward_config,
    check_vocabulary,
    load_config,
    load_tokenizer,
)
from ppo_core.rollout.sampler import stop_token


def check_inputs(settings: Settings) -> None:
    """Raise if an input would cause an error or a misleading result later in the run.

    Raises:
        ConfigError: a setting is invalid.
        DataError: a data set cannot be used.
        ModelError: a model cannot be used.
    """
    output = Path(settings.output_dir)
    check_outputs(settings.output_dir, settings.summary_json)
    _check_models(settings)
    data_sets.human_labels(settings.evaluation, allow_urls=settings.allow_data_urls)
    _check_prompts(settings)
    _check_pairs(settings)
    if settings.sft_data:
        _report(data_sets.sft_rows(settings), "sft", output)
    # The judge is checked last, because a request to a server may cost money.
    check_judge(settings.judge, settings.reward_model, settings.judging)


def check_outputs(output_dir: str, summary_json: str) -> None:
    """Raise if the folder or the file for results cannot be written.

    Raises:
        ConfigError: the folder or the file cannot be written.
    """
    require_writable(Path(output_dir), "output_dir")
    if summary_json:
        if Path(summary_json).is_dir():
            raise ConfigError(f"summary_json={summary_json!r} is a folder. Set it to a file.")
        if Path(summary_json).is_fifo():
            raise ConfigError(f"summary_json={summary_json!r} is a pipe. Set it to a file.")
        require_writable(Path(summary_json).parent, "summary_json")


def require_writable(folder: Path, name: str) -> None:
    """Create a folder if it does not exist, and raise if it is not writable.

    Raises:
        ConfigError: the folder cannot be created or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    # ValueError: the path contains a null character.
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{name}: nothing can be written into {str(folder)!r} ({reason_of(error)}). "
            "Choose a writable folder."
        ) from error


def _check_models(settings: Settings) -> None:
    """Raise if the files of a model are refused, or the reward model cannot score texts.

    The reward model must have one score, and an end-of-sequence token if needed.
    """
    for path in filter(None, (settings.policy, settings.reward_model)):
        check_model_folder(path)
        check_vocabulary(load_config(path), load_tokenizer(path), path)
    path = settings.reward_model or settings.policy
    if settings.reward_model:
        check_reward_config(path)
    if settings.reward_model_training.end_of_text and load_tokenizer(path).eos_token_id is None:
        raise ModelError(
            f"The tokenizer of the reward model, '{path}', has no end-of-sequence token, which "
            "each text must end with. Set end_of_text = false in [reward_model_training]."
        )


def _check_prompts(settings: Settings) -> None:
    """Raise if prompts are too long for a response, or if all references are empty."""
    tokenizer = load_tokenizer(settings.policy)
    stop_token(tokenizer, settings.ppo.stop_token, settings.ppo.stop_token_id)
    context = context_length(load_config(settings.policy))
    answered = data_sets.examples(
        settings.eval_prompts, settings.evaluation, allow_urls=settings.allow_data_urls
    )
    require_references([row["reference"] for row in answered])
    for rows, name in (
        (data_sets.training_prompts(settings), "prompts"),
        (data_sets.evaluation_rows(settings), "eval_prompts"),
    ):
        _report(rows, name, Path(settings.output_dir))
        encoded = [encode_prompt(tokenizer, prompt) for prompt in rows.column("prompt")]
        try:
            check_prompt_lengths(
                encoded, context=context, response_length=settings.ppo.response_length
            )
        except DataError as error:
            raise DataError(f"{name}={rows.source}: {error}") from error


def _check_pairs(settings: Settings) -> None:
    """Raise if preferences cannot be read or exceed the maximum length."""
    test = data_sets.test_pairs(settings)
    _report(test, "preferences-test", Path(settings.output_dir))
    _check_held_out(settings, test)
    if settings.reward_model:
        return
    rows = data_sets.training_pairs(settings)
    _report(rows, "preferences", Path(settings.output_dir))
    if not rows.usable:
        raise DataError(
            f"preferences={rows.source}: no pair is left to train the reward model on after ties "
            "and validation pairs are removed. Add more preferences."
        )
    tokenizer = load_tokenizer(settings.policy)
    training = settings.reward_model_training
    lengths: list[int] = []
    for row in rows.usable:
        prompt = encode_prompt(tokenizer, row.get("prompt", ""))
        lengths += (
            len(prompt) + len(encode_response(tokenizer, row[side], end=training.end_of_text))
            for side in ("chosen", "rejected")
        )
    if too_long := sum(length > training.max_length for length in lengths):
        raise DataError(
            f"preferences={rows.source}: {too_long} of {len(lengths)} prompts with a response "
            f"are longer than reward_model_training.max_length={training.max_length}; the longest "
            f"has {max(lengths)} tokens. Raise max_length, or shorten or remove these rows."
        )


def _check_held_out(settings: Settings, rows: Rows) -> None:
    """Raise if the held-out preferences cannot validate this reward model."""
    if all(pair.tie for pair in label_pairs(rows.usable)):
        raise DataError(
            f"The {len(rows.usable)} held-out preferences of {rows.source} are all ties, so the "
            "reward model's accuracy cannot be measured. Add preferences that are not ties."
        )
    path = settings.reward_model or settings.policy
    tokenizer, context = load_tokenizer(path), context_length(load_config(path))
    end = settings.reward_model_training.end_of_text
    lengths = [
        len(encode_dialogue(tokenizer, row.get("prompt", ""), row[side], end=end))
        for row in rows.usable
        for side in ("chosen", "rejected")
    ]
    unreadable = sum(not 0 < length <= (context or length) for length in lengths)
    if unreadable:
        raise DataError(
            f"Of the {len(lengths)} held-out responses (with prompt) of {rows.source}, the reward "
            f"model cannot read {unreadable}: all have {min(lengths)} to {max(lengths)} tokens, "
            f"and the model reads 1 to {context or 'any number'}. Shorten or remove such rows."
        )


def _report(rows: Rows, name: str, output: Path) -> None:
    """Print the number of rows, and write unusable rows to a file."""
    print(f"{name}: {len(rows.usable)} rows of {rows.source}, digest {rows.digest}", flush=True)
    if rows.quarantined:
        path = output / "quarantine" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_jsonl(path, rows.quarantined)
        print(f"{name}: {len(rows.quarantined)} unusable rows written to {path}", flush=True)
