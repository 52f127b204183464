"""Answers that a training keeps while it runs."""

from pathlib import Path

import pytest

from pipeline.results.step_records import WatchedPrompt
from pipeline.results.watched_prompts import read_watched
from ppo_core.errors import DataError
from ppo_core.reporting.sample_table import Completions, log_table


def keep(folder: Path, update: int, answers: list[str]) -> None:
    scores = [float(len(one)) for one in answers]
    table = Completions([f"ask {n}" for n in range(len(answers))], answers, scores)
    log_table(table, step=update, callbacks=(), output_dir=folder)


def test_each_prompt_has_its_answers_in_the_order_of_the_updates(tmp_path: Path):
    assert read_watched(tmp_path) == []
    for update, answers in {0: ["a", "b"], 12: ["aaa", "b"], 5: ["aa", ""]}.items():
        keep(tmp_path, update, answers)
    (tmp_path / "completions" / "step-000005-copy.jsonl").write_text("of a person")
    assert read_watched(tmp_path) == [
        WatchedPrompt(prompt="ask 0", answers={0: ("a", 1.0), 5: ("aa", 2.0), 12: ("aaa", 3.0)}),
        WatchedPrompt(prompt="ask 1", answers={0: ("b", 1.0), 5: ("", 0.0), 12: ("b", 1.0)}),
    ]


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("", "differ in their number of rows"),
        ("{", "line 1"),
        ('{"query": "a", "response": "b"}', "is damaged: score"),
        ('{"query": "a", "response": "b", "score": "1"}', "is damaged: score"),
    ],
)
def test_a_damaged_file_is_refused_by_name(content: str, wrong: str, tmp_path: Path):
    keep(tmp_path, 0, ["a"])
    (tmp_path / "completions" / "step-000004.jsonl").write_text(content)
    with pytest.raises(DataError, match=rf"completions.*{wrong}"):
        read_watched(tmp_path)
