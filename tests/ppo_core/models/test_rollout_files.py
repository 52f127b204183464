"""Kept rollouts are read as they were written, and a file of another form is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

from ppo_core.errors import ModelError
from ppo_core.models.files.rollout_files import (
    CHATS,
    ROLLOUTS_FILE,
    kept_tensors,
    read_rollouts,
    write_rollouts,
)
from tests.helpers.models.rollouts import TEMPERATURE, make_rollout, row_of
from tests.helpers.models.tiny import VOCABULARY

Tensors = dict[str, Tensor]


CHATTED = [[{"role": "user", "content": "w1 \u00fc"}], "w2", [4, 5]]


def write(folder: Path, *prompts: object) -> None:
    write_rollouts([kept_tensors(make_rollout(), prompts or [[3]] * 3)], folder)


def test_rollouts_are_read_as_they_were_written(tmp_path: Path):
    written = [make_rollout(), make_rollout((2, 2), (1, 9), seed=1)]
    prompts = [row_of(written[0], b)[:length] for b, length in enumerate((3, 7, 1))]
    write_rollouts([kept_tensors(each, [[3]] * len(each)) for each in written], tmp_path)
    read = read_rollouts(tmp_path, VOCABULARY)
    for one, other in zip(written, read, strict=True):
        assert_close(vars(other.rollout), vars(one))
    assert read[0].prompts == prompts
    assert read[0].rollout.temperature == TEMPERATURE


def test_chats_are_read_as_they_were_written(tmp_path: Path):
    write(tmp_path, *CHATTED)
    (read,) = read_rollouts(tmp_path, VOCABULARY)
    assert read.prompts == CHATTED


def test_a_folder_without_rollouts_has_none(tmp_path: Path):
    write_rollouts([], tmp_path)
    assert not [*tmp_path.iterdir()]
    assert read_rollouts(tmp_path, VOCABULARY) == []


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, f"0.{name}": change(tensors[f"0.{name}"])}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {name: value for name, value in tensors.items() if name != "0.has_stop"},
        lambda tensors: {f"x{name}": value for name, value in tensors.items()},
        changed("prompt_ids", lambda ids: ids + VOCABULARY),
        changed("response_ids", lambda ids: ids - VOCABULARY),
        changed("response_ids", lambda ids: ids.float()),
        changed("response_ids", lambda ids: ids[:, :3].contiguous()),
        changed("prompt_ids", lambda ids: ids[0]),
        changed("prompt_ids", lambda ids: ids[:0]),
        changed("prompt_lengths", lambda lengths: lengths + 1),
        changed("response_lengths", lambda lengths: lengths - lengths.min()),
        changed("response_lengths", lambda lengths: lengths[:2]),
        changed("response_mask", torch.ones_like),
        changed("response_mask", torch.zeros_like),
        changed("temperature", torch.zeros_like),
        changed("temperature", lambda t: t * float("nan")),
        changed(CHATS, lambda text: text[:-1].clone()),
        changed(CHATS, lambda text: text.float() * 3),
        changed(CHATS, lambda text: torch.tensor([*b"[1, 2, 3]"], dtype=torch.uint8)),
        changed(CHATS, lambda text: torch.tensor([*b'["w1"]'], dtype=torch.uint8)),
        changed(CHATS, lambda text: torch.tensor([*b'["w1", "w2", [61]]'], dtype=torch.uint8)),
        changed(CHATS, lambda text: torch.tensor(10**15)),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, change: Callable[[Tensors], Tensors]):
    write(tmp_path, *CHATTED)
    file = tmp_path / ROLLOUTS_FILE
    save_file(change(load_file(file)), file)
    with pytest.raises(ModelError, match="is not a file of rollouts that a run has written"):
        read_rollouts(tmp_path, VOCABULARY)


def test_a_truncated_file_is_refused(tmp_path: Path):
    write(tmp_path)
    file = tmp_path / ROLLOUTS_FILE
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match="cannot be read"):
        read_rollouts(tmp_path, VOCABULARY)


def test_a_token_of_another_vocabulary_is_refused(tmp_path: Path):
    write(tmp_path, *CHATTED)
    with pytest.raises(ModelError, match="belongs to a vocabulary of more than 3 tokens"):
        read_rollouts(tmp_path, 3)
