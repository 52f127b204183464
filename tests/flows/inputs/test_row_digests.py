"""Digests of rows: erased rows are in nothing, and a version knows the rows it was made from."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from pipeline.inputs.lineage import trace
from pipeline.inputs.row_digests import count_seen, digests_in, digests_of_raw, write_digests
from pipeline.inputs.run_data import RunData
from pipeline.preflight.check_inputs import check_inputs
from pipeline.settings.make_settings import make_settings
from ppo_core.errors import DataError, TrainingError
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_rows
from tests.helpers.servers.full_disk import full_disk
from tests.helpers.slow_cases import slow

PAIR = {"prompt": "w40 w41", "chosen": "w42", "rejected": "w43"}
RANKED = {"prompt": "w40", "responses": ["w41", "w42", "w43"], "ranks": [1, 2, 3]}
USER = {"role": "user", "content": "w40"}
TALK = [USER, {"role": "assistant", "content": "w41"}]
AGAIN = [{"role": "user", "content": "w44"}, {"role": "assistant", "content": "w45"}]
REPEATED = {"prompt": "w40 ", "chosen": "w40 w42", "rejected": "w40 w43"}


def is_seen(raw: dict[str, Any], row: dict[str, Any]) -> bool:
    return not digests_of_raw(raw, "The row", {}).isdisjoint(digests_in(row))


@pytest.mark.parametrize(
    ("raw", "row"),
    [
        (PAIR, {**PAIR, "margin": 1.0, "annotator": "ada"}),
        (PAIR | {"chosen": "w43", "rejected": "w42", "margin": 2}, PAIR),
        (PAIR, PAIR | {"rejected": "w44"}),
        (PAIR, {"prompt": "w40 w41", "completion": "w42"}),
        ({"prompt": "w40 w41"}, PAIR),
        ({"prompt": "w40 w41", "completion": "w43", "label": False}, PAIR),
        ({"prompt": "w40 w41", "completion": "w42"}, PAIR),
        (PAIR, {"prompt": "w40 w41", "reference": "w42"}),
        ({"prompt": "w40"}, {"prompt": [USER], "reference": None}),
        ({"prompt": [USER]}, {"prompt": "w40", "reference": None}),
        (RANKED, {"prompt": "w40", "chosen": "w41", "rejected": "w43"}),
        ({"messages": TALK}, {"messages": TALK}),
        ({"messages": TALK}, {"prompt": [USER], "reference": "w41"}),
        ({"prompt": "w40"}, {"messages": TALK}),
        ({"prompt": "w40", "completion": "w41"}, {"messages": TALK}),
        ({"prompt": "w40"}, {"messages": [*TALK, *AGAIN]}),
        ({"messages": TALK}, {"messages": [*TALK, *AGAIN]}),
        ({"prompt": [*TALK, AGAIN[0]], "completion": "w45"}, {"messages": [*TALK, *AGAIN]}),
        ({"text": "w40 w41"}, {"text": "w40 w41"}),
        # As in a data set whose responses repeat their prompts, and in one whose do not.
        (REPEATED, {"prompt": "w40 ", "chosen": "w42", "rejected": "w43"}),
        (REPEATED, REPEATED),
        (
            {"prompt": "w40 w41", "first": "w43", "second": "w42", "label": "tie"},
            {"prompt": "w40 w41", "first": "w43", "second": "w42", "label": "first"},
        ),
    ],
)
def test_a_row_is_known_in_every_use_of_it(raw: dict[str, Any], row: dict[str, Any]):
    assert is_seen(raw, row)


@pytest.mark.parametrize(
    ("raw", "row"),
    [
        (PAIR, PAIR | {"chosen": "w44"}),
        (PAIR, {"prompt": "w40 w41", "completion": "w44"}),
        (PAIR, {"prompt": "w40 w41", "reference": None}),
        ({"prompt": "w40 w41", "completion": "w44"}, PAIR),
        ({"prompt": "w40"}, PAIR),
        ({"text": "w40"}, {"text": "w40 w41"}),
        ({"messages": TALK}, {"prompt": [USER], "reference": None}),
        ({"messages": [*TALK, *AGAIN]}, {"messages": TALK}),
        ({"prompt": "w40", "completion": "w45"}, {"messages": [*TALK, *AGAIN]}),
        ({"prompt": "", "chosen": "w1", "rejected": "w2"}, {"prompt": "", "chosen": "w3"}),
    ],
)
def test_another_row_with_the_same_prompt_is_another_row(raw: dict[str, Any], row: dict[str, Any]):
    assert not is_seen(raw, row)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"name": "Ada"}, "columns name, cannot be used: no known kind of row has these columns"),
        ({}, "columns none, cannot be used"),
        ({"prompt": 7}, "columns prompt, cannot be used: it is a row without a text"),
        ({"prompt": None, "reference": "w1"}, "columns reference, cannot be used"),
    ],
)
def test_a_row_that_is_no_row_of_a_data_set_is_refused(raw: dict[str, Any], reason: str):
    with pytest.raises(DataError, match=f"^The row, with the {reason}"):
        digests_of_raw(raw, "The row", {})


EVERYWHERE = {"sft": 1, "preferences": 1, "prompts": 1, "eval-prompts": 1}


def write_everywhere(table: dict[str, Any]) -> None:
    """Write PAIR, and what it is in other data sets, at the start of each data set."""
    added = {
        "sft_data": {"prompt": "w40 w41", "completion": "w42"},
        "preferences": PAIR,
        "prompts": {"prompt": "w40 w41", "reference": "w42"},
        "eval_prompts": {"prompt": "w40 w41", "reference": "w42"},
    }
    for name, row in added.items():
        path = Path(table[name])
        path.write_text(json.dumps(row) + "\n" + path.read_text())


def texts_of(data: RunData) -> str:
    return " ".join(str(row) for given, _ in data.digested().values() for row in given)


@pytest.mark.parametrize(
    "row", [PAIR, *slow({"prompt": "w40 w41"}, {"prompt": "w40 w41", "completion": "w42"})]
)
def test_an_erased_row_is_in_no_data_set_and_no_file(tmp_path: Path, capsys, row: dict[str, Any]):
    table = tiny_table(tmp_path)
    write_everywhere(table)
    erase = write_rows(tmp_path / "erase.jsonl", [row, {"text": "of no data set"}])
    before, after = (RunData(make_settings(table | more, {})) for more in ({}, {"erase": erase}))
    assert "w40 w41'" in texts_of(before)
    check_inputs(after.settings)
    assert capsys.readouterr().out.count("jsonl, less 1 erased") >= 4
    assert "w40 w41'" not in texts_of(after)
    outputs = (tmp_path / "outputs").rglob("*")
    assert not any("w40 w41" in path.read_text() for path in outputs if path.is_file())
    lineage = trace(flow_run="1", settings=asdict(after.settings), data=after.by_use())
    erased = {one.name for one in lineage.data if "less 1 erased" in one.source}
    assert {"sft", "preferences", "prompts", "eval-prompts"} <= erased
    assert after.training_pairs().digest != before.training_pairs().digest


def test_without_erased_rows_nothing_changes(tmp_path: Path):
    table = tiny_table(tmp_path)
    erase = write_rows(tmp_path / "erase.jsonl", [PAIR])
    before, after = (
        RunData(make_settings(table | more, {})).by_use() for more in ({}, {"erase": erase})
    )
    assert {name: (rows.key, rows.source) for name, rows in after.items()} == {
        name: (rows.key, rows.source) for name, rows in before.items()
    }


def test_labels_of_people_are_erased_too(tmp_path: Path):
    votes = [{"prompt": f"w{n}", "first": "w1", "second": "w2", "label": "tie"} for n in range(9)]
    labels = write_rows(tmp_path / "votes.jsonl", votes)
    erase = write_rows(tmp_path / "erase.jsonl", [{"prompt": "w3"}, votes[5]])
    table = tiny_table(tmp_path) | {"erase": erase, "evaluation": {"human_labels": labels}}
    found = RunData(make_settings(table, {})).labels()
    assert found is not None
    assert found.column("prompt") == [f"w{n}" for n in range(9) if n not in (3, 5)]


def test_a_data_set_whose_rows_are_all_erased_is_refused(tmp_path: Path):
    table = tiny_table(tmp_path)
    with pytest.raises(DataError, match=r"'prompts': .*`erase` names all 32 rows"):
        check_inputs(make_settings(table | {"erase": table["prompts"]}, {}))
    strange = write_rows(tmp_path / "erase.jsonl", [{"prompt": "w1"}, {"person": "Ada"}])
    with pytest.raises(DataError, match=r"'erase': .*erase.jsonl', row 1, with the columns person"):
        check_inputs(make_settings(table | {"erase": strange}, {}))


def test_the_file_has_the_rows_that_were_used_and_no_text(tmp_path: Path):
    table = tiny_table(tmp_path)
    write_everywhere(table)
    rows = Path(table["preferences"]).read_text().splitlines()
    settings = make_settings(table, {})
    data, path = RunData(settings), tmp_path / "rows.parquet"
    write_digests(data.digested(), path)
    found = parquet.read_table(path)
    whole = found.filter(found["is_row"]).to_pylist()
    counts = Counter(row["data_set"] for row in whole)
    assert counts == {name: len(rows) for name, rows in data.by_use().items()}
    for name in counts:
        digests = [r["digest"] for r in found.to_pylist() if r["data_set"] == name]
        assert digests == sorted(digests)
    assert b"w40" not in path.read_bytes()
    asked = [digests_of_raw(json.loads(line), "", {}) for line in (rows[0], rows[-1])]
    # The last pairs are held out, so no model was trained on them.
    assert count_seen(found, asked[:1]) == {**EVERYWHERE, "": 1}
    assert count_seen(found, asked) == {**EVERYWHERE, "": 2, "preferences-test": 1}
    assert count_seen(found, [digests_of_raw({"prompt": "w57 w1 w57"}, "", {})]) == {}
    assert count_seen(found, []) == {}
    before = path.read_bytes()
    with full_disk(100), pytest.raises(TrainingError, match=r"rows\.parquet' cannot be"):
        write_digests(data.digested(), path)
    assert path.read_bytes() == before
