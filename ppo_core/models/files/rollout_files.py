"""Keep the first rollouts of a run beside its critic, for the next run that starts from the critic.

Log-probabilities and scores are not kept: the next run scores the responses with its own rewards.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_core.data.chat_template import is_messages
from ppo_core.data.prompts import Prompt
from ppo_core.data.types import Rollout
from ppo_core.errors import ModelError, library_errors

ROLLOUTS_FILE = "first_rollouts.safetensors"

CHATS = "chats"
"""Name of the tensor with the prompts as JSON in UTF-8 bytes; only if a prompt is a chat."""

_DTYPES = {
    "prompt_ids": torch.int32,
    "prompt_lengths": torch.int32,
    "response_ids": torch.int32,
    "response_lengths": torch.int32,
    "has_stop": torch.bool,
    "response_mask": torch.bool,
    "temperature": torch.float64,
}

_CHATS = TypeAdapter(list[str | list[dict[str, str]] | list[int]])


@dataclass(frozen=True, kw_only=True)
class KeptRollout:
    """A rollout of an earlier run; its log-probabilities are 0."""

    rollout: Rollout
    prompts: list[Prompt]
    """Token ids; if any prompt is a chat, all prompts in the form that the earlier run read."""


def kept_tensors(rollout: Rollout, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """Return the tensors of a rollout that are kept, and its prompts if one of them is a chat.

    The tensors are on the CPU, token ids and lengths as int32.
    """
    temperature = torch.tensor(rollout.temperature, dtype=torch.float64)
    given = {**vars(rollout), "temperature": temperature}
    kept = {name: given[name].to("cpu", dtype).contiguous() for name, dtype in _DTYPES.items()}
    if any(is_messages(prompt) for prompt in prompts):
        text = json.dumps([p if isinstance(p, str) else [*p] for p in prompts])
        kept[CHATS] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return kept


def write_rollouts(rollouts: Sequence[Mapping[str, Tensor]], folder: Path) -> None:
    """Write `kept_tensors` of rollouts into the folder of a critic; without rollouts, no file."""
    named = {
        f"{number}.{name}": tensor
        for number, tensors in enumerate(rollouts)
        for name, tensor in tensors.items()
    }
    if named:
        save_file(named, folder / ROLLOUTS_FILE)


def read_rollouts(folder: str | Path, vocab_size: int) -> list[KeptRollout]:
    """Return the rollouts in the folder of a critic; none if the folder has no file of rollouts.

    Raises:
        ModelError: the file is damaged, does not have the form that `write_rollouts` gives it, or
            has a token id that is not below `vocab_size`.
    """
    file = Path(folder) / ROLLOUTS_FILE
    if not file.is_file():
        return []
    with library_errors(ModelError, f"'{file}' cannot be read", "Train the critic again."):
        tensors = load_file(file)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, field = name.partition(".")
        parts.setdefault(number, {})[field] = tensor
    found = [
        _as_kept(parts[number], vocab_size) if number.isdecimal() else None
        for number in sorted(parts)
    ]
    rollouts = [each for each in found if each is not None]
    if len(rollouts) < len(found):
        raise ModelError(
            f"'{file}' is not a file of rollouts that a run has written, or belongs to a "
            f"vocabulary of more than {vocab_size:,} tokens. Train the critic again."
        )
    return rollouts


def _as_kept(tensors: Mapping[str, Tensor], vocab_size: int) -> KeptRollout | None:
    """Return the rollout of `kept_tensors`; None if the tensors have another form."""
    chats = tensors.get(CHATS)
    if not _is_whole({n: t for n, t in tensors.items() if n != CHATS}, vocab_size):
        return None
    wide = {
        name: tensors[name].long() if dtype == torch.int32 else tensors[name]
        for name, dtype in _DTYPES.items()
    }
    temperature = float(wide.pop("temperature"))
    logprobs = torch.zeros(wide["response_ids"].shape)
    rollout = Rollout(**wide, logprobs=logprobs, temperature=temperature)
    lengths = rollout.prompt_lengths.tolist()
    prompts: list[Prompt] = [
        ids[:length] for ids, length in zip(rollout.prompt_ids.tolist(), lengths, strict=True)
    ]
    if chats is not None:
        if chats.dtype != torch.uint8 or chats.ndim != 1:
            return None
        try:
            prompts = [*_CHATS.validate_json(bytes(chats.tolist()))]
        except ValueError:
            return None
    if len(prompts) != len(lengths) or any(_has_other_tokens(p, vocab_size) for p in prompts):
        return None
    return KeptRollout(rollout=rollout, prompts=prompts)


def _has_other_tokens(prompt: Prompt, vocab_size: int) -> bool:
    return any(isinstance(token, int) and not 0 <= token < vocab_size for token in prompt)


def _is_whole(found: Mapping[str, Tensor], vocab_size: int) -> bool:
    """Return whether tensors have the names, dtypes, shapes and values of a rollout."""
    if {name: tensor.dtype for name, tensor in found.items()} != _DTYPES:
        return False
    prompts, responses = found["prompt_ids"], found["response_ids"]
    if prompts.ndim != 2 or responses.ndim != 2 or 0 in (*prompts.shape, *responses.shape):
        return False
    rows = (len(responses),)
    shapes = {
        "prompt_ids": (*rows, prompts.shape[1]),
        "prompt_lengths": rows,
        "response_lengths": rows,
        "has_stop": rows,
        "response_mask": tuple(responses.shape),
        "temperature": (),
    }
    if any(tuple(found[name].shape) != shape for name, shape in shapes.items()):
        return False
    width = responses.shape[1]
    beyond = torch.arange(width) >= found["response_lengths"][:, None]
    return (
        all(bool(((ids >= 0) & (ids < vocab_size)).all()) for ids in (prompts, responses))
        and _are_lengths(found["prompt_lengths"], prompts.shape[1])
        and _are_lengths(found["response_lengths"], width)
        and not bool((found["response_mask"] & beyond).any())
        and bool(found["response_mask"].any())
        and float(found["temperature"]) > 0
    )


def _are_lengths(lengths: Tensor, most: int) -> bool:
    return bool(((lengths >= 1) & (lengths <= most)).all())
