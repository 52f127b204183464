"""Samples reach a person unchanged, wherever they are shown."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import TrainerCallback
from transformers.integrations import MLflowCallback, TensorBoardCallback, WandbCallback

from ppo_core.errors import DataError
from ppo_core.reporting.sample_table import Completions, log_table, print_table

NASTY = 'a | b\n<script>alert("x")</script> `code` **bold** [l](http://x) $m$ &amp; \\ _i_'


def table(*responses: str) -> Completions:
    queries = [f"query {i}" for i in range(len(responses))]
    return Completions(queries, list(responses), [0.5 * i for i in range(len(responses))])


def log(completions: Completions, step: int, folder: Path, *callbacks: TrainerCallback) -> None:
    log_table(completions, step=step, callbacks=callbacks, output_dir=folder)


def test_a_table_has_one_response_and_one_score_for_each_query():
    with pytest.raises(DataError, match="1 queries, 2 responses and 1 scores"):
        Completions(["q"], ["a", "b"], [0.0])


# --- On the terminal ---


def test_the_table_shows_title_query_response_and_score(capsys: pytest.CaptureFixture):
    print_table(Completions(["why?"], ["because"], [1.23456]), "[b]Step[/b] 3", limit=5)
    shown = capsys.readouterr().out
    for text in ("[b]Step[/b] 3", "query", "response", "score", "why?", "because", "1.235"):
        assert text in shown
    assert " of " not in shown


def test_markup_of_a_model_is_printed_letter_by_letter(capsys: pytest.CaptureFixture):
    print_table(table("[bold]x[/bold]", "[/]", ":smile:", "[link=http://x]y"), "t", limit=9)
    shown = capsys.readouterr().out
    for text in ("[bold]x[/bold]", "[/]", ":smile:", "[link=http://x]y"):
        assert text in shown


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture):
    print_table(table("\x1b[2Jgone\x07\r\x9b31m\x00", "two\nlines"), "t", limit=9)
    shown = capsys.readouterr().out
    assert not set(shown) & set("\x1b\x07\r\x9b\x00")
    assert "[2Jgone31m" in shown
    assert "two" in shown and "lines" in shown


def test_the_table_has_no_colors_even_if_they_are_forced(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table(table("first"), "t", limit=9)
    assert "\x1b" not in capsys.readouterr().out


def test_only_the_first_rows_are_printed_and_it_says_so(capsys: pytest.CaptureFixture):
    print_table(table("first", "second", "third"), "t", limit=2)
    shown = capsys.readouterr().out
    assert "first" in shown and "second" in shown and "third" not in shown
    assert "2 of 3" in shown


# --- In a file ---


def test_the_file_of_a_step_holds_every_row_exactly(tmp_path: Path):
    completions = Completions(["q\u2028é", NASTY], ["007", "\x1b[31m\n"], [0.1, -2.0])
    log(completions, 123, tmp_path)
    written = (tmp_path / "completions/step-000123.jsonl").read_text(encoding="utf-8")
    assert "é" in written
    lines = written.split("\n")
    assert [json.loads(line) for line in lines[:-1]] == [
        {"query": "q\u2028é", "response": "007", "score": 0.1},
        {"query": NASTY, "response": "\x1b[31m\n", "score": -2.0},
    ]
    assert lines[-1] == ""


def test_callbacks_without_an_open_log_get_no_table(tmp_path: Path):
    log(table("a"), 1, tmp_path, TrainerCallback(), TensorBoardCallback(), MLflowCallback())
    assert [path.name for path in tmp_path.rglob("*.*")] == ["step-000001.jsonl"]


# --- Where the metrics go ---


def test_tensorboard_shows_the_text_and_runs_none_of_it(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugin_util import markdown_to_safe_html
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path / "log")
    log(Completions([NASTY], ["fine"], [0.25]), 7, tmp_path, TensorBoardCallback(writer))
    writer.close()
    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    (event,) = events.Tensors("completions/text_summary")
    assert event.step == 7
    html = markdown_to_safe_html(event.tensor_proto.string_val[0])
    (cells,) = cells_of(html)
    assert cells == [NASTY, "fine", "0.25"]
    for tag in ("<script", "<strong", "<em", "<a "):
        assert tag not in html


def cells_of(html: str) -> list[list[str]]:
    """The texts of the rows of a table, as a browser shows them; br is a new line."""
    from html.parser import HTMLParser

    class Reader(HTMLParser):
        rows: list[list[str]]

        def handle_starttag(self, tag, attrs) -> None:
            if tag == "tr":
                self.rows.append([])
            elif tag == "td":
                self.rows[-1].append("")
            elif tag == "br":
                self.rows[-1][-1] += "\n"

        def handle_data(self, data: str) -> None:
            if self.rows and self.rows[-1] and data.strip():
                self.rows[-1][-1] += data

    reader = Reader()
    reader.rows = []
    reader.feed(html)
    return [row for row in reader.rows if row]


@pytest.fixture
def mlflow(mlflow_client):
    import mlflow

    return mlflow


def test_mlflow_adds_the_rows_of_each_step_to_one_table(tmp_path: Path, mlflow):
    with mlflow.start_run() as run:
        log(table(NASTY, "b"), 5, tmp_path, MLflowCallback())
        log(table("c"), 10, tmp_path, MLflowCallback())
        shown = mlflow.load_table("completions.json", run_ids=[run.info.run_id])
    assert shown[["step", "query", "response", "score"]].values.tolist() == [
        [5, "query 0", NASTY, 0.0],
        [5, "query 1", "b", 0.5],
        [10, "query 0", "c", 0.0],
    ]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_gets_the_table_at_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import wandb

    monkeypatch.chdir(tmp_path)
    with wandb.init(mode="offline", dir=tmp_path) as run:
        log(table(NASTY), 7, tmp_path, WandbCallback())
        assert run.summary["train/global_step"] == 7
        assert run.summary["completions"]["_type"] == "table-file"
    (written,) = tmp_path.glob("wandb/offline-*/files/media/table/completions*.json")
    assert json.loads(written.read_text()) == {
        "columns": ["query", "response", "score"],
        "data": [["query 0", NASTY, 0.0]],
    }
