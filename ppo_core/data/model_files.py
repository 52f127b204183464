"""Write a model and its tokenizer; replace old files only after all new files are written."""

import json
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from ppo_core.io.atomic_files import explained_writes, sync_to_disk

UNFINISHED = ".unfinished"
"""Subfolder into which `replaced_together` writes all files before it moves them."""

ADAPTER = "adapter"
"""Subfolder for the adapter, in PEFT's format, inside the folder of the merged model."""

_MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "value_head.safetensors",
    "adapter_config.json",
    "adapter_model.safetensors",
    f"{ADAPTER}/adapter_config.json",
    f"{ADAPTER}/adapter_model.safetensors",
    f"{ADAPTER}/README.md",
)
"""Patterns of the files of a model, of its value head and of its adapter."""

TOKENIZER_CONFIG = "tokenizer_config.json"
"""File that every tokenizer has."""

_TOKENIZER_FILES = (
    TOKENIZER_CONFIG,
    "tokenizer.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
"""Patterns of the files of a tokenizer."""


@contextmanager
def replaced_together(folder: Path) -> Iterator[Path]:
    """Yield an empty folder; after the block, move the new files to the same paths in `folder`.

    If the block fails, the files in `folder` are unchanged. Otherwise, model files in `folder` for
    which there is no new file are deleted, because they would be loaded with the new model. All
    other files are kept.

    Raises:
        TrainingError: a file cannot be written, for example because the disk is full.
    """
    unfinished = folder / UNFINISHED
    with explained_writes(folder), safetensors_as_os_errors():
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            yield unfinished
            files = [path for path in unfinished.rglob("*") if path.is_file()]
            for path in files:
                sync_to_disk(path)
            for path in files:
                target = folder / path.relative_to(unfinished)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
            _delete_stale(folder, {path.relative_to(unfinished) for path in files})
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _delete_stale(folder: Path, new: Collection[Path]) -> None:
    """Delete the model files in a folder that are not in `new`, and subfolders that become empty.

    Files of a tokenizer are deleted only if there is a new tokenizer. `new` are paths inside the
    folder.
    """
    patterns = _MODEL_FILES + (_TOKENIZER_FILES if Path(TOKENIZER_CONFIG) in new else ())
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        if path.relative_to(folder) not in new:
            path.unlink()
            with suppress(OSError):  # the folder still has files
                path.parent.rmdir()


@contextmanager
def safetensors_as_os_errors() -> Iterator[None]:
    """Turn an error of safetensors, which is no OSError, into an OSError.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer in transformers' format, and add its stop token to the model in the folder.

    The tokenizer's end-of-sequence token may be the end of a chat turn, see `set_prompt_format`.
    `generate` stops at the tokens in the model's generation_config, which come from the base model.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    try:
        tokenizer.save_pretrained(folder)
        _add_stop_token(folder / "generation_config.json", tokenizer.eos_token_id)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(folder)) from error
    except Exception as error:
        # The library `tokenizers` raises plain `Exception`, not a subclass.
        if type(error) is not Exception:
            raise
        raise OSError(f"The tokenizer was not written to '{folder}': {error}") from error


def _add_stop_token(file: Path, token: int | None) -> None:
    """Add a token to the stop tokens of a generation_config that has others."""
    fields = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    stops = fields.get("eos_token_id")
    known = stops if isinstance(stops, list) else [stops]
    if token is not None and stops is not None and token not in known:
        fields["eos_token_id"] = [token, *known]
        file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
