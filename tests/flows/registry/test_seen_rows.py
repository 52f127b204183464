"""`registry.py rows` and `saw`: the rows of a version, and the versions that saw a row."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

import registry
from pipeline.inputs.row_digests import DIGEST, ROWS_FILE, digest_of_row, digests_in
from pipeline.registry.seen_rows import describe_versions_that_saw
from pipeline.tracking.mlflow_client import connect
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.runs.served_versions import NAME, register
from tests.helpers.servers.mlflow_store import tracking_to, write_database

PAIRS = [{"prompt": f"w{n}", "chosen": "w1", "rejected": "w2"} for n in range(5)]


@pytest.fixture(scope="module", autouse=True)
def versions(tmp_path_factory) -> Iterator[None]:
    """Version 1 has no digests, version 2 those of pairs 0 to 2, and version 3 of pairs 2 to 4."""
    folder = tmp_path_factory.mktemp("mlflow")
    with tracking_to(write_database(folder / "mlflow.db")):
        for number, rows in enumerate(([], PAIRS[:3], PAIRS[2:]), 1):
            version = folder / str(number)
            version.mkdir()
            (version / "MLmodel").write_text("flavors: {}\n")
            if rows:
                write_digests(version / ROWS_FILE, rows)
            register(connect(), version)
        yield


def write_digests(path: Path, rows: list[dict[str, str]]) -> None:
    found = [(one, one == digest_of_row(row)) for row in rows for one in digests_in(row)]
    columns = {
        "data_set": ["preferences"] * len(found),
        "digest": pyarrow.array([one for one, _ in found], DIGEST),
        "is_row": [whole for _, whole in found],
    }
    parquet.write_table(pyarrow.table(columns), path)


def test_the_rows_of_a_version_are_printed_as_digests(capsys):
    assert registry.main(["rows", NAME, "2"]) == 0
    out, counted = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted(
        f"preferences {digest_of_row(row).hex()}" for row in PAIRS[:3]
    )
    assert counted == "Different rows of version 2: preferences 3\n"
    assert registry.main(["rows", NAME, "1"]) == 1
    assert "Version 1 of 'rlhf-policy' has no rows.parquet" in capsys.readouterr().err
    assert registry.main(["rows", NAME, "9"]) == 1


UNKNOWN = "versions without row digests, which may also have seen some of the rows: 1\n"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (PAIRS[0], "version 2 saw 1 of 1 rows: preferences 1\n"),
        ({"prompt": "w4"}, "version 3 (champion) saw 1 of 1 rows: preferences 1\n"),
        ({"prompt": "w7"}, "no version of rlhf-policy is known to have seen any of 1 rows\n"),
    ],
)
def test_the_versions_that_saw_a_row_are_printed(capsys, row: dict[str, str], told: str):
    assert registry.main(["saw", NAME, json.dumps(row)]) == 0
    assert capsys.readouterr().out == told + UNKNOWN


def test_the_versions_that_saw_rows_of_a_file_are_printed(tmp_path: Path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", [PAIRS[1], PAIRS[2], {"prompt": "w9"}])
    assert registry.main(["saw", NAME, path]) == 0
    assert capsys.readouterr().out == (
        "version 2 saw 2 of 3 rows: preferences 2\n"
        "version 3 (champion) saw 1 of 3 rows: preferences 1\n" + UNKNOWN
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ('{"prompt": ', "is not a JSON object"),
        ('{"person": "Ada"}', "with the columns person, cannot be used"),
        ("no-such-file.jsonl", "no-such-file.jsonl"),
    ],
)
def test_what_is_no_row_is_refused(capsys, given: str, reason: str):
    assert registry.main(["saw", NAME, given]) == 1
    assert reason in capsys.readouterr().err


def test_a_name_without_versions_saw_nothing():
    told = "no version of never-registered is known to have seen any of 0 rows"
    assert describe_versions_that_saw("never-registered", []) == [told]


def test_a_changed_file_of_digests_is_refused(tmp_path: Path, capsys):
    folder = tmp_path / "version"
    folder.mkdir()
    (folder / "MLmodel").write_text("flavors: {}\n")
    write_digests(folder / ROWS_FILE, PAIRS)
    version, place = register(connect(), folder)
    write_digests(Path(place.removeprefix("file://")) / ROWS_FILE, PAIRS[:1])
    assert registry.main(["rows", NAME, version]) == 1
    assert "rows.parquet" in capsys.readouterr().err
    connect().delete_model_version(NAME, version)
    connect().set_registered_model_alias(NAME, "champion", "3")
