"""Keep the first rollouts of a run beside its critic, for the next run that starts from the critic.

Only token ids, lengths and masks are kept: the next run scores the responses with its own rewards.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ppo_core.data.types import Rollout
from ppo_core.errors import ModelError

ROLLOUTS_FILE = "first_rollouts.safetensors"

_DTYPES = {
    "prompt_ids": torch.int32,
    "prompt_lengths": torch.int32,
    "response_ids": torch.int32,
    "response_lengths": torch.int32,
    "has_stop": torch.bool,
    "response_mask": torch.bool,
    "temperature": torch.float64,
}


def rollout_tensors(rollout: Rollout) -> dict[str, Tensor]:
    """Return the tensors of a rollout that are kept: all but the log-probabilities.

    The tensors are on the CPU, token ids and lengths as int32. `as_rollout` is the inverse.
    """
    given = {**vars(rollout), "temperature": torch.tensor(rollout.temperature)}
    return {name: given[name].to("cpu", dtype).contiguous() for name, dtype in _DTYPES.items()}


def as_rollout(tensors: Mapping[str, Tensor]) -> Rollout:
    """Return the rollout of `rollout_tensors`; its log-probabilities are 0."""
    wide = {
        name: tensors[name].long() if dtype == torch.int32 else tensors[name]
        for name, dtype in _DTYPES.items()
    }
    temperature = float(wide.pop("temperature"))
    logprobs = torch.zeros(wide["response_ids"].shape)
    return Rollout(**wide, logprobs=logprobs, temperature=temperature)


def write_rollouts(rollouts: Sequence[Rollout], folder: Path) -> None:
    """Write rollouts into the folder of a critic; without rollouts, write no file."""
    if not rollouts:
        return
    named = {
        f"{number}.{name}": tensor
        for number, rollout in enumerate(rollouts)
        for name, tensor in rollout_tensors(rollout).items()
    }
    save_file(named, folder / ROLLOUTS_FILE)


def read_rollouts(folder: str | Path, vocab_size: int) -> list[Rollout]:
    """Return the rollouts in the folder of a critic; none if the folder has no file of rollouts.

    Raises:
        ModelError: the file does not have the form that `write_rollouts` gives it, or has a token
            id that is not below `vocab_size`.
    """
    file = Path(folder) / ROLLOUTS_FILE
    if not file.is_file():
        return []
    tensors = load_file(file)
    number = len(tensors) // len(_DTYPES)
    parts = [{name: tensors.get(f"{n}.{name}") for name in _DTYPES} for n in range(number)]
    if len(tensors) % len(_DTYPES) or not all(_is_whole(part, vocab_size) for part in parts):
        raise ModelError(
            f"'{file}' is not a file of rollouts that a run has written, or its token ids are not "
            f"below {vocab_size:,}, the size of the vocabulary. Remove the file to start from the "
            "critic without them."
        )
    return [as_rollout(part) for part in parts]  # type: ignore[arg-type]


def _is_whole(part: Mapping[str, Tensor | None], vocab_size: int) -> bool:
    """Return whether tensors have the dtypes, shapes and values of a rollout."""
    if any(part[name] is None or part[name].dtype != dtype for name, dtype in _DTYPES.items()):  # type: ignore[union-attr]
        return False
    found = {name: tensor for name, tensor in part.items() if tensor is not None}
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
