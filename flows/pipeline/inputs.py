"""Everything about a run that can be refused before anything is trained."""

import os
from pathlib import Path

from pipeline.data import Row, Rows, held_out, read_rows, write_jsonl
from pipeline.judges import check_judge
from pipeline.settings import Settings
from ppo_core.errors import ConfigError, DataError
from ppo_core.loading import check_reward_config, load_config, load_tokenizer
from ppo_core.prompts import check_prompt_lengths, context_length, encode_prompt, encode_response
from ppo_core.rollout import stop_token


def check_inputs(settings: Settings) -> None:
    """Refuse what would fail, or mislead, later in the run.

    Raises:
        ConfigError: a setting cannot work.
        DataError: a data set cannot be used.
        ModelError: a model cannot play its part.
    """
    output = Path(settings.output_dir)
    require_writable(output, "output_dir")
    if settings.summary_json:
        if Path(settings.summary_json).is_dir():
            raise ConfigError(f"summary_json={settings.summary_json!r} is a folder. Name a file.")
        require_writable(Path(settings.summary_json).parent, "summary_json")
    if settings.reward_model:
        check_reward_config(settings.reward_model)
    check_judge(settings.judge, settings.reward_model)
    _check_prompts(settings)
    _check_pairs(settings)
    if settings.sft_data:
        _report(sft_rows(settings), "sft", output)


def sft_rows(settings: Settings) -> Rows:
    """Rows of prompt and completion."""
    return read_rows(settings.sft_data, ["prompt", "completion"])


def training_pairs(settings: Settings) -> Rows:
    """Preferences to train the reward model on."""
    rows = _read_pairs(settings.preferences)
    if settings.preferences_test:
        return rows
    return held_out(rows, settings.held_out_share)[0]


def test_pairs(settings: Settings) -> Rows:
    """Preferences to validate the reward model on."""
    if settings.preferences_test:
        return _read_pairs(settings.preferences_test)
    return held_out(_read_pairs(settings.preferences), settings.held_out_share)[1]


def training_prompts(settings: Settings) -> Rows:
    """Prompts that PPO trains on, with references if there are any."""
    return read_rows(settings.prompts, ["prompt"], ["reference"])


def evaluation_prompts(settings: Settings) -> list[Row]:
    """Prompts and references that the policies are judged on."""
    rows = read_rows(settings.eval_prompts, ["prompt", "reference"]).usable
    return [*rows[: settings.evaluation.num_prompts]]


def require_writable(folder: Path, name: str) -> None:
    """Make a folder and refuse one that nothing can be written into.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{name}: nothing can be written into {folder.absolute()} ({error.strerror}). "
            "Name a folder that can be written."
        ) from error


def _check_prompts(settings: Settings) -> None:
    """Refuse prompts that leave no room for a response."""
    tokenizer = load_tokenizer(settings.policy)
    stop_token(tokenizer, settings.ppo.stop_token, settings.ppo.stop_token_id)
    context = context_length(load_config(settings.policy))
    for rows, name in (
        (training_prompts(settings), "prompts"),
        (read_rows(settings.eval_prompts, ["prompt", "reference"]), "eval_prompts"),
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
    """Refuse preferences that cannot be read, or that the training would refuse as too long."""
    _report(test_pairs(settings), "preferences-test", Path(settings.output_dir))
    if settings.reward_model:
        return
    rows = training_pairs(settings)
    _report(rows, "preferences", Path(settings.output_dir))
    tokenizer = load_tokenizer(settings.policy)
    training = settings.reward_model_training
    lengths = [
        len(encode_prompt(tokenizer, row.get("prompt", "")))
        + len(encode_response(tokenizer, row[side], end=training.end_of_text))
        for row in rows.usable
        for side in ("chosen", "rejected")
    ]
    if too_long := sum(length > training.max_length for length in lengths):
        raise DataError(
            f"preferences={rows.source}: {too_long} of {len(lengths)} responses with their prompt "
            f"are longer than reward_model_training.max_length={training.max_length}; the longest "
            f"has {max(lengths)} tokens. Raise it, or shorten or remove those rows."
        )


def _read_pairs(source: str) -> Rows:
    return read_rows(source, ["chosen", "rejected"], ["prompt"])


def _report(rows: Rows, name: str, output: Path) -> None:
    """Say how many rows there are, and keep those that were set aside where they can be read."""
    print(f"{name}: {len(rows.usable)} rows of {rows.source}, digest {rows.digest}", flush=True)
    if rows.quarantined:
        path = output / "quarantine" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_jsonl(path, rows.quarantined)
        print(f"{name}: {len(rows.quarantined)} unusable rows set aside in {path}", flush=True)
