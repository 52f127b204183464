"""Whole runs of the flow, each of whose inputs has another form and another container.

`make forms` runs them, and prints which version each form went into.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from pipeline.preflight.check_inputs import check_inputs
from pipeline.settings.make_settings import make_settings
from tests.flows.whole_flow.test_flow_run import client_of, run_flow
from tests.forms.data_forms import (
    CONTAINERS,
    DEMONSTRATIONS,
    PAIRS,
    PAIRS_OF_A_ROW,
    PROMPTS,
    REFERENCES,
    RENAMED,
    VOTES,
    Make,
    write_container,
)
from tests.helpers.inputs.pipeline_inputs import JUDGE, write_model
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.tiny import make_policy

pytestmark = pytest.mark.timeout(900)

Input = tuple[str, str]
"""Form and container of a data set."""

USES: dict[str, tuple[dict[str, Make], range]] = {
    "sft_data": (DEMONSTRATIONS, range(16)),
    "preferences": (PAIRS, range(64)),
    "preferences_test": (PAIRS, range(100, 116)),
    "prompts": (PROMPTS, range(32)),
    "eval_prompts": (REFERENCES, range(200, 216)),
    "human_labels": (VOTES, range(300, 310)),
}
"""Use -> the forms that it reads, and the numbers of its rows."""

RUNS: dict[str, dict[str, Input]] = {
    "text, plain": {
        "sft_data": ("prompt, completion", "csv"),
        "preferences": ("texts", "jsonl.gz"),
        "preferences_test": ("texts, prompt inside", "json"),
        "prompts": ("prompt", "parquet"),
        "eval_prompts": ("prompt, reference", "csv.gz"),
        "human_labels": ("prompt", "jsonl"),
    },
    "text, instructions and TL;DR": {
        "sft_data": ("instruction, input, output", "json"),
        "preferences": ("TL;DR", "jsonl"),
        "preferences_test": ("HH", "parquet"),
        "prompts": ("instruction, input", "relative folder"),
        "eval_prompts": ("instruction, input, output", "absolute folder"),
        "human_labels": ("instruction", "csv"),
    },
    "text, questions and HH": {
        "sft_data": ("question, answer", "save_to_disk"),
        "preferences": ("HH", "jsonl"),
        "preferences_test": ("TL;DR", "json.gz"),
        "prompts": ("question", "csv"),
        "eval_prompts": ("info, reference", "parquet"),
        "human_labels": ("question", "json"),
    },
    "text, renamed": {
        "sft_data": ("renamed", "parquet"),
        "preferences": ("renamed", "csv"),
        "preferences_test": ("renamed", "json"),
        "prompts": ("renamed", "shards"),
        "eval_prompts": ("renamed", "save_to_disk:split"),
        "human_labels": ("renamed", "jsonl.gz"),
    },
    "text, without prompts": {
        "sft_data": ("text", "jsonl.gz"),
        "preferences": ("texts without a prompt", "csv"),
        "preferences_test": ("texts without a prompt", "json"),
        "prompts": ("info", "jsonl"),
        "eval_prompts": ("prompt, response", "parquet"),
        "human_labels": ("prompt", "relative folder"),
    },
    "text, judged and ranked": {
        "sft_data": ("prompt, completion", "tsv"),
        "preferences": ("KTO", "tsv.gz"),
        "preferences_test": ("ranks", "pq"),
        "prompts": ("query", "pq"),
        "eval_prompts": ("question, answer", "tsv"),
        "human_labels": ("prompt", "tsv"),
    },
    "text, ranked by an instruction": {
        "sft_data": ("prompt, response", "tsv.gz"),
        "preferences": ("ranks", "jsonl"),
        "preferences_test": ("KTO", "csv"),
        "prompts": ("prompt", "tsv"),
        "eval_prompts": ("instruction, input, output", "pq"),
        "human_labels": ("query", "pq"),
    },
    "chat, ShareGPT": {
        "sft_data": ("ShareGPT", "jsonl"),
        "preferences": ("ShareGPT", "pq"),
        "preferences_test": ("completions of UltraFeedback", "parquet"),
        "prompts": ("ShareGPT", "json"),
        "eval_prompts": ("ShareGPT", "jsonl.gz"),
        "human_labels": ("prompt of messages", "pq"),
    },
    "chat, content parts": {
        "sft_data": ("content parts", "pq"),
        "preferences": ("KTO of messages", "parquet"),
        "preferences_test": ("content parts", "jsonl"),
        "prompts": ("content parts", "shards"),
        "eval_prompts": ("content parts", "save_to_disk"),
        "human_labels": ("prompt", "tsv.gz"),
    },
    "chat, scores": {
        "sft_data": ("ShareGPT", "save_to_disk:split"),
        "preferences": ("completions of UltraFeedback", "json"),
        "preferences_test": ("scores", "save_to_disk"),
        "prompts": ("prompt", "tsv.gz"),
        "eval_prompts": ("ShareGPT", "pq"),
        "human_labels": ("prompt", "csv"),
    },
    "chat, messages": {
        "sft_data": ("messages", "jsonl"),
        "preferences": ("UltraFeedback", "parquet"),
        "preferences_test": ("messages, prompt inside", "jsonl.gz"),
        "prompts": ("prompt of messages", "json"),
        "eval_prompts": ("messages", "shards"),
        "human_labels": ("prompt of messages", "jsonl"),
    },
    "chat, messages apart": {
        "sft_data": ("prompt, completion of messages", "parquet"),
        "preferences": ("messages, prompt apart", "save_to_disk"),
        "preferences_test": ("HH", "jsonl"),
        "prompts": ("messages", "jsonl.gz"),
        "eval_prompts": ("query, reference_response", "csv"),
        "human_labels": ("query", "csv.gz"),
    },
    "chat of texts": {
        "sft_data": ("query, reference_response", "json.gz"),
        "preferences": ("HH", "json"),
        "preferences_test": ("messages and texts", "parquet"),
        "prompts": ("chosen, rejected of HH", "csv"),
        "eval_prompts": ("prompt, completion of messages", "save_to_disk"),
        "human_labels": ("prompt of HH", "absolute folder"),
    },
}


def write_run(folder: Path, inputs: dict[str, Input], *, is_chat: bool) -> dict[str, Any]:
    """Write the inputs of a run, and return its settings."""
    policy = write_model(folder / "policy")
    if is_chat:
        make_policy().save_pretrained(policy)
        make_chat_tokenizer().save_pretrained(policy)
    (folder / "judge.py").write_text(JUDGE)
    paths = {}
    for use, (form, container) in inputs.items():
        forms, numbers = USES[use]
        rows = [forms[form](n) for n in numbers]
        paths[use] = write_container(folder, use, container, rows)
    training = {"batch_size": 16, "max_length": 48, "learning_rate": 1e-3}
    is_renamed = any(form == "renamed" for form, _ in inputs.values())
    return {
        "policy": policy,
        "judge": "python:judge.py:judge",
        "registered_model": "tiny-policy",
        "accept_reward_model": True,
        **{use: path for use, path in paths.items() if use != "human_labels"},
        "sft": training,
        "reward_model_training": training,
        "ppo": {"total_episodes": 16, "batch_size": 8, "response_length": 6},
        "evaluation": {"human_labels": paths["human_labels"]},
        **({"columns": RENAMED} if is_renamed else {}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_every_form_goes_into_a_registered_version(
    tmp_path: Path, run: str, record_property: Callable[[str, object], None]
):
    settings = write_run(tmp_path, RUNS[run], is_chat=run.startswith("chat"))
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(settings))
    ran = run_flow(tmp_path, "--config", "settings", "settings.toml", "run")
    versions = []
    if (tmp_path / "mlflow.db").exists():
        versions = client_of(tmp_path).search_model_versions("name='tiny-policy'")
    for use, (form, container) in RUNS[run].items():
        record_property(f"{use}|{form}|{container}", f"{run}: {len(versions)} registered")
    assert ran.code == 0, ran.log
    assert [version.version for version in versions] == [1]


@pytest.mark.parametrize("run", RUNS)
def test_every_form_passes_the_checks_of_a_run(
    tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    settings = write_run(tmp_path, RUNS[run], is_chat=run.startswith("chat"))
    check_inputs(make_settings(settings, {}))
    told = capsys.readouterr().out
    each = {use: PAIRS_OF_A_ROW.get(form, 1) for use, (form, _) in RUNS[run].items()}
    counts = {
        "prompts": 32,
        "eval_prompts": 16,
        "preferences": int(64 * each["preferences"]),
        "preferences-test": int(16 * each["preferences_test"]),
    }
    for name, count in {**counts, "sft": 16}.items():
        assert re.search(rf"^{name}: .*: {count} rows, reading ", told, re.MULTILINE), told
    assert "left out" not in told


def test_every_form_and_every_container_is_in_a_run():
    inputs = [found for run in RUNS.values() for found in run.values()]
    known = {form for forms, _ in USES.values() for form in forms}
    assert {form for form, _ in inputs} == known
    assert {container for _, container in inputs} == set(CONTAINERS)
