"""Both commands of `ppo_core` train on every form; each form comes in another container."""

import re
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from tests.forms.data_forms import (
    CHAT_ALONE,
    CONTAINERS,
    DEMONSTRATIONS,
    PAIRS,
    PAIRS_OF_A_ROW,
    PROMPTS,
    RENAMED,
    Make,
    write_container,
)
from tests.helpers.inputs.pipeline_inputs import write_model
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.tiny import make_policy
from tests.helpers.runs.forked_python import run_python

RECURSIVE = {container for container in CONTAINERS if container[:3] not in ("csv", "tsv")}

USES: dict[str, tuple[dict[str, Make], str]] = {
    "sft": (DEMONSTRATIONS, "-m ppo_core.supervised sft --batch_size 8 --model_name_or_path"),
    "reward": (PAIRS, "-m ppo_core.supervised reward --batch_size 8 --model_name_or_path"),
    "ppo_core": (
        PROMPTS,
        "-m ppo_core --total_episodes 8 --batch_size 8 --response_length 4 --reward_model_path "
        "reward --num_sample_generations 0 --report_to none --model_name_or_path",
    ),
}
"""Command -> its forms, and its words up to the model."""


def cases() -> Iterator[tuple[str, str, str]]:
    """Command, form and container; nested values have no place in a csv file."""
    for use, (forms, _) in USES.items():
        containers = cycle(CONTAINERS)
        for form, make in forms.items():
            is_flat = not any(isinstance(value, dict | list) for value in make(0).values())
            yield use, form, next(c for c in containers if is_flat or c in RECURSIVE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    write_model(folder / "text")
    make_policy().save_pretrained(folder / "chat")
    make_chat_tokenizer().save_pretrained(folder / "chat")
    write_model(folder / "reward-of-text", labels=1)
    write_model(folder / "reward-of-chat", labels=1)
    make_chat_tokenizer().save_pretrained(folder / "reward-of-chat")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("use", "form", "container"), [*cases()])
def test_a_command_trains_on_a_form(
    models: Path,
    tmp_path: Path,
    use: str,
    form: str,
    container: str,
    record_property: Callable[[str, object], None],
):
    forms, command = USES[use]
    name = write_container(tmp_path, "rows", container, [forms[form](n) for n in range(8)])
    kind = "chat" if form in CHAT_ALONE else "text"
    words = command.replace(
        "reward_model_path reward", f"reward_model_path {models}/reward-of-{kind}"
    )
    if use == "ppo_core" and ":" in name:
        name, _, split = name.partition(":")
        words = words.replace("--model_name", f"--dataset_train_split {split} --model_name")
    renamed = [f"{field}={RENAMED[field]}" for field in RENAMED if RENAMED[field] in forms[form](0)]
    columns = ["--columns", *renamed] if form == "renamed" else []
    given = [*words.split(), models / kind, "--dataset_name", name, "--output_dir", "out", *columns]
    ran = run_python(*given, folder=tmp_path)
    record_property(f"{use}|{form}|{container}", f"{kind} model trained")
    assert ran.returncode == 0, ran.stderr
    count = 8 * PAIRS_OF_A_ROW.get(form, 1) if use == "reward" else 8
    assert f": {count:.0f} rows, reading" in ran.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


REFUSED: dict[str, tuple[str, str, str]] = {
    "pairs as demonstrations": ("sft", "texts", "completion .*are chosen, prompt, rejected"),
    "prompts as demonstrations": ("sft", "query", "completion .*are query"),
    "demonstrations as pairs": ("reward", "messages", "chosen, rejected.*are messages"),
    "TL;DR posts as pairs": ("reward", "info", "chosen, rejected.*are info"),
    "texts as prompts": ("ppo_core", "text", "prompt .*are text"),
    "renamed, without columns": ("ppo_core", "renamed", "prompt .*are better, post, worse"),
}
"""Command, form of the rows, and what the message says of the columns."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_command_refuses_a_form_of_another_use(models: Path, tmp_path: Path, case: str):
    use, form, says = REFUSED[case]
    make = {**PROMPTS, **DEMONSTRATIONS, **PAIRS}[form]
    write_container(tmp_path, "rows", "jsonl", [make(n) for n in range(8)])
    given = [*USES[use][1].split(), models / "chat", "--dataset_name", "rows.jsonl"]
    ran = run_python(*given, "--output_dir", "out", folder=tmp_path)
    assert ran.returncode == 1
    assert re.search(f"rows.jsonl.*There is no column {says}.*Rename a column", ran.stderr)
    assert "Traceback" not in ran.stderr
    assert not any((tmp_path / "out").glob("*"))
