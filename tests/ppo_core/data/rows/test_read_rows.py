"""Rows are read once, kept on disk, and counted where they are left out."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from datasets import Dataset, config

from pipeline.settings.make_settings import make_settings
from pipeline.settings.win_rate_arguments import WinRateArguments
from ppo_core.config.row_settings import ReadOptions
from ppo_core.config.script_arguments import ScriptArguments
from ppo_core.data.rows import read_rows as reader
from ppo_core.data.rows.describe import describe_reading
from ppo_core.data.rows.overlong import fit_pairs, fit_prompts
from ppo_core.data.rows.read_rows import (
    TooManyLeftOutError,
    derive,
    each,
    read_rows,
    read_source,
)
from ppo_core.data.rows.row_error import RowError, list_reasons
from ppo_core.data.rows.rows_on_disk import read_written_rows
from ppo_core.data.rows.rows_on_disk import write_rows as write_rows_on_disk
from ppo_core.data.sources.source import source_of_rows
from ppo_core.errors import ConfigError, DataError, TrainingError
from ppo_core.supervised.supervised_cli import SupervisedArguments
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.inputs.rows import plain, rows_of
from tests.helpers.models.chat import ENDED, make_chat_tokenizer, say
from tests.helpers.models.tiny import make_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "ppo_core"


PROMPTS = [{"prompt": f"w{number}"} for number in range(8)]


def test_a_second_reading_takes_the_rows_from_the_cache(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", PROMPTS)
    first = read_rows(path, "prompts")
    monkeypatch.setattr(reader, "find_row_format", None)
    second = read_rows(path, "prompts")
    assert plain(first) == plain(second) == PROMPTS
    assert first.digest == second.digest
    assert first.reading == second.reading == {"prompt": "prompt"}


def test_a_changed_file_and_another_form_are_read_again(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", PROMPTS)
    texts = read_rows(path, "prompts")
    assert read_rows(path, "prompts", is_chat=True).digest != texts.digest
    write_rows(tmp_path / "rows.jsonl", PROMPTS[:3])
    assert len(read_rows(path, "prompts")) == 3


def test_a_changed_byte_in_the_cache_is_not_used(tmp_path, cache):
    path = write_rows(tmp_path / "rows.jsonl", PROMPTS)
    read_rows(path, "prompts")
    (table,) = cache.rglob("rows.arrow")
    content = table.read_bytes()
    table.unlink()
    table.write_bytes(content.replace(b"w7", b"w8"))
    assert plain(read_rows(path, "prompts")) == PROMPTS


def test_a_long_reading_shows_progress_and_a_short_one_shows_none(tmp_path, monkeypatch, capsys):
    path = write_rows(tmp_path / "rows.jsonl", PROMPTS)
    read_rows(path, "prompts")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(reader, "BAR_DELAY", 0)
    monkeypatch.setattr("ppo_core.io.progress_bar.SECONDS_BETWEEN_LINES", 0)
    read_rows(path, "prompts", is_chat=True)
    assert "preparing rows.jsonl: 8 row" in capsys.readouterr().err


def test_the_rows_are_mapped_from_disk(tmp_path):
    rows = read_rows(write_rows(tmp_path / "rows.jsonl", PROMPTS), "prompts")
    assert isinstance(rows.table, Dataset)
    assert rows.table.cache_files[0]["filename"].endswith("rows.arrow")


def test_the_digest_is_that_of_the_fields_that_are_read(tmp_path):
    def digest(row):
        return rows_of("prompts", [row]).digest

    assert digest({"prompt": "w0", "id": 1}) == digest({"prompt": "w0", "id": 2})
    assert digest({"prompt": "w0"}) != digest({"prompt": "w1"})


def test_one_bad_row_in_a_hundred_is_left_out_and_kept_aside(tmp_path):
    rows = [{"prompt": "w0"}] * 60 + [{"prompt": " ", "id": 5}] + [{"prompt": "w1"}] * 39
    read = read_rows(write_rows(tmp_path / "rows.jsonl", rows), "prompts")
    assert (len(read), read.left_out) == (99, {"with an empty prompt": 1})
    (path,) = read.left_out_files
    assert json.loads(path.read_text()) == {
        "row": 60,
        "reason": "with an empty prompt",
        "values": {"prompt": " ", "id": 5},
    }
    assert read.table[60]["row"] == 61
    assert describe_reading(read).endswith("; left out: 1 with an empty prompt")


def test_rows_of_equal_content_keep_their_own_numbers(tmp_path):
    good = [{"prompt": f"w{number}"} for number in range(149)]
    first = write_rows(tmp_path / "first.jsonl", [{"prompt": ""}, *good])
    last = write_rows(tmp_path / "last.jsonl", [*good, {"prompt": ""}])
    read = [read_rows(path, "prompts") for path in (first, last)]
    assert read[0].digest == read[1].digest
    derived = [derive(rows, "same", {}, each(dict)) for rows in read]
    assert [rows.table[0]["row"] for rows in derived] == [1, 0]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "file")
    with pytest.raises(TrainingError, match=r"file/ppo_core' cannot be written"):
        read_rows(write_rows(tmp_path / "rows.jsonl", PROMPTS), "prompts")


def test_at_most_one_row_in_a_hundred_is_left_out_of_all_stages():
    rows = rows_of("prompts", [{"prompt": "w0"}] * 149 + [{"prompt": ""}])
    with pytest.raises(DataError, match="1 of the 149 rows"):
        derive(rows, "one more", {}, each(leave_out_first))


def test_of_many_reasons_the_five_most_frequent_are_listed():
    counts = {f"with fault {number}": number for number in range(1, 301)}
    assert list_reasons(counts) == (
        "300 with fault 300, 299 with fault 299, 298 with fault 298, 297 with fault 297, "
        "296 with fault 296, 43660 for other reasons"
    )
    assert (
        list_reasons({"without a text": 1, "with a null": 2}) == "1 without a text, 2 with a null"
    )


def leave_out_first(row):
    if row["row"] == 0:
        raise RowError("called first")
    return dict(row)


@pytest.mark.parametrize("kind", ["prompts", "pairs"])
def test_half_of_a_surrogate_pair_leaves_its_row_out(kind):
    rows = [{"prompt": f"w{n} \U0001f600", "chosen": "w1", "rejected": "w2"} for n in range(100)]
    rows[7]["prompt"] = "w7 \ud83d"
    read = rows_of(kind, rows)
    assert len(read) == 99 and 7 not in read.column("row")
    [(reason, count)] = read.left_out.items()
    assert (reason, count) == ("with half of a surrogate pair, which is not a character", 1)
    [line] = read.left_out_files[0].read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["values"]["prompt"] == "w7 \ud83d"


def test_two_bad_rows_in_a_hundred_are_refused_by_reason(tmp_path, cache):
    rows = [{"prompt": "w0"}] * 98 + [{"prompt": ""}, {"prompt": 7}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(
        DataError,
        match=r"2 of the 100 rows of '.*rows.jsonl' cannot be used: 1 with an empty prompt, 1 "
        r"without a text or messages in the prompt. The first is row 98, counted from 0: prompt: "
        r"''. At most 1% of the rows may be left out \(max_left_out=0.01\). Correct or remove "
        r"these rows, or set max_left_out=0.02 to go on without these rows.",
    ):
        read_rows(path, "prompts")


def test_the_values_of_a_refused_row_are_shortened_with_closed_quotes(tmp_path):
    long = {"prompt": "a" + " b" * 99 + " c", "chosen": 7, "rejected": ["d" * 99]}
    path = write_rows(tmp_path / "rows.jsonl", [long] * 3)
    says = r"row 0, .*: prompt: 'a[ b]+\.\.\.[ b]+ c', chosen: 7, rejected: \['d+\.\.\.d+'\]\. At"
    with pytest.raises(TooManyLeftOutError, match=says) as found:
        read_rows(path, "pairs")
    assert len(str(found.value)) < 700
    assert [len(file.read_text().splitlines()) for file in found.value.files] == [3]


def test_the_limit_that_an_error_names_lets_the_rows_pass_and_changes_no_row(tmp_path, monkeypatch):
    rows = [{"prompt": f"w{number}"} for number in range(65)] + [{"prompt": ""}] * 2
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"set max_left_out=0.03 to go on") as found:
        read_rows(path, "prompts")
    # 2 of 67 rows are 2.985 %. The rows have been read, so another limit reads none again.
    assert str(found.value).count("max_left_out") == 2
    alone = rows_of("prompts", rows[:65])
    monkeypatch.setattr(reader, "find_row_format", None)
    read = read_rows(path, "prompts", options=ReadOptions(max_left_out=0.03))
    assert (len(read), read.left_out) == (65, {"with an empty prompt": 2})
    assert (read.digest, plain(read)) == (alone.digest, plain(alone))
    assert read_rows(path, "prompts", options=ReadOptions(max_left_out=0.9)).key == read.key
    for limit in (0.0, 0.029):
        with pytest.raises(DataError, match=rf"max_left_out={limit:g}\)"):
            read_rows(path, "prompts", options=ReadOptions(max_left_out=limit))


def test_a_conversion_counts_with_the_limit_of_its_rows(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [*PROMPTS, {"prompt": ""}])
    rows = read_rows(path, "prompts", options=ReadOptions(max_left_out=0.2))
    with pytest.raises(DataError, match=r"Rows left out before: 1.* set max_left_out=0.223 to"):
        derive(rows, "one more", {}, each(leave_out_first))
    rows = read_rows(path, "prompts", options=ReadOptions(max_left_out=0.223))
    found = derive(rows, "one more", {}, each(leave_out_first))
    # 2 of 9 rows are 22.23 %. Another process converts the rows further.
    write_rows_on_disk(found, tmp_path / "job")
    handed = read_written_rows(tmp_path / "job")
    assert (len(handed), handed.max_left_out, handed.used) == (7, 0.223, found.used)
    (tmp_path / "failed" / "rows.arrow").mkdir(parents=True)
    with pytest.raises(TrainingError, match="cannot be written"):
        write_rows_on_disk(found, tmp_path / "failed")
    assert [path.name for path in (tmp_path / "failed").iterdir()] == ["rows.arrow"]


def test_a_list_with_many_pairs_counts_as_one_row():
    list_of_three = {"prompt": "q", "responses": ["a", "b", "c"], "ranks": [1, 2, 3]}
    lists = source_of_rows([list_of_three] * 19 + [{**list_of_three, "ranks": None}])
    options = ReadOptions(max_left_out=0.2)
    rows = read_source(lists, "pairs", is_chat=False, options=options)
    assert (len(rows), rows.used) == (57, Fraction(19, 20))
    # One of 20 lists, and then the three pairs of another list.
    found = derive(rows, "but one list", {}, each(leave_out_first))
    assert found.used == Fraction(19, 20) * Fraction(54, 57)
    with pytest.raises(TooManyLeftOutError, match=r"before: 1 \(5%\)\. .* 10% are left"):
        derive(replace(rows, max_left_out=0.099), "but one", {}, each(leave_out_first))


def test_no_limit_is_named_if_no_row_is_left(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": ""}] * 3)
    with pytest.raises(DataError, match=r"3 of the 3 rows .* Correct or remove these rows\.$"):
        read_rows(path, "prompts", options=ReadOptions(max_left_out=0.999))


@pytest.mark.parametrize(
    "make",
    [
        lambda value: make_settings({}, {}, [f"max_left_out={value}"]),
        lambda value: ScriptArguments(max_left_out=value),
        lambda value: WinRateArguments(model="m", judge="rule", max_left_out=value),
        lambda value: SupervisedArguments(
            model_name_or_path="m", dataset_name="d", output_dir="o", max_left_out=value
        ),
    ],
)
@pytest.mark.parametrize("value", [-0.01, 1, 1.5, float("nan"), float("inf")])
def test_a_limit_that_is_no_fraction_of_the_rows_is_refused(make, value):
    with pytest.raises(ConfigError, match=r"max_left_out=.* must be|max_left_out.*finite"):
        make(value)


@pytest.mark.parametrize("content", ["", " \n"])
def test_a_file_without_rows_is_refused(tmp_path, content):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=r"rows.jsonl' is empty: its split 'train' has no row"):
        read_rows(str(tmp_path / "rows.jsonl"), "prompts")


def test_a_missing_column_names_the_data_set(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "w0"}])
    with pytest.raises(DataError, match=r"rows.jsonl': There is no column prompt"):
        read_rows(path, "prompts")


def test_an_optional_column_is_there_if_every_row_has_it():
    assert rows_of("prompts", [{"prompt": "w0", "reference": "w1"}]).has("reference")
    assert not rows_of("prompts", PROMPTS).has("reference")
    assert not rows_of("prompts", PROMPTS).has("other")


def test_a_part_is_a_data_set_of_its_own():
    rows = rows_of("prompts", PROMPTS)
    part = rows.part(2, 4, "two rows")
    assert part.column("prompt") == ["w2", "w3"]
    assert part.source == "the rows (two rows)"
    assert part.digest not in (rows.digest, rows.part(2, 5, "").digest)


def test_derived_rows_count_what_was_left_out_before():
    prompts = [{"prompt": f"w{number}"} for number in range(299)]
    rows = rows_of("prompts", [*prompts, {"prompt": ""}])

    def convert(row):
        if row["prompt"] == "w3":
            raise RowError("called three")
        return None if row["prompt"] == "w4" else {**row, "prompt": row["prompt"] + "!"}

    found = derive(rows, "shouted", {"by": 1}, each(convert))
    assert len(found) == 297
    assert found.left_out == {"with an empty prompt": 1, "called three": 1}
    assert found.table[3]["prompt"] == "w5!"
    assert found.table[3]["row"] == 5
    assert len(found.left_out_files) == 2
    assert derive(rows, "shouted", {"by": 1}, pytest.fail).digest == found.digest


# --- Rows that are too long --------------------------------------------------------

LONG = {"prompt": "w1 w2 w3 w4"}


def fitting(rows, tokenizer, context, overlong):
    return fit_prompts(rows, tokenizer, context=context, response_length=0, overlong=overlong)


def prompts_with(row, count=99):
    return rows_of("prompts", [{"prompt": "w0"}] * count + [row])


def test_a_prompt_that_is_too_long_is_left_out_up_to_one_in_a_hundred():
    kept = fitting(prompts_with(LONG), make_tokenizer(), 3, "drop")
    assert (len(kept), kept.left_out) == (99, {"with more than 3 tokens": 1})
    assert len(fitting(prompts_with(LONG), make_tokenizer(), 4, "drop")) == 100
    assert len(fitting(prompts_with(LONG), make_tokenizer(), None, "drop")) == 100
    with pytest.raises(DataError, match=r"1 of the 11 rows .* 1 with more than 3 tokens.*Lower"):
        fitting(prompts_with(LONG, 10), make_tokenizer(), 3, "drop")
    with pytest.raises(DataError, match="Row 99 has 4 tokens, and at most 3 fit"):
        fitting(prompts_with(LONG), make_tokenizer(), 3, "error")


def test_a_prompt_is_cut_on_the_left_between_words():
    kept = fitting(prompts_with(LONG), make_tokenizer(), 3, "truncate")
    assert kept.table[99]["prompt"] == "w2 w3 w4"
    assert kept.left_out == {}


def test_messages_lose_their_oldest_turns_and_keep_the_system():
    system = {"role": "system", "content": "w9"}
    prompt = [system, *say("w0 w1", "w2", "w3", "w4", "w5")]
    rows = rows_of("prompts", [{"prompt": prompt}], is_chat=True)
    tokenizer = make_chat_tokenizer(ENDED)
    # <system> w9 <user> w3 <assistant> w4 <eos> <user> w5 <assistant>
    (kept,) = fitting(rows, tokenizer, 10, "truncate").column("prompt")
    assert kept == [system, *say("w3", "w4", "w5")]
    (kept,) = fitting(rows, tokenizer, 9, "truncate").column("prompt")
    assert kept == [system, *say("w5")]
    with pytest.raises(DataError, match="1 with more than 4 tokens"):
        fitting(rows, tokenizer, 4, "truncate")


def test_a_text_of_hh_is_cut_at_a_turn():
    text = "\n\nHuman: w1 w2\n\nAssistant: w3\n\nHuman: w4 w5\n\nAssistant:"
    rows = rows_of("prompts", [{"prompt": text}])
    (kept,) = fitting(rows, make_tokenizer(), 5, "truncate").column("prompt")
    assert kept == "\n\nHuman: w4 w5\n\nAssistant:"


def test_pairs_are_measured_with_their_longer_answer():
    rows = rows_of("pairs", [{"prompt": "w1 w2", "chosen": "w3", "rejected": "w4 w5"}])
    assert len(fit_pairs(rows, make_tokenizer(), 5, "drop", end_of_text=True)) == 1
    (kept,) = fit_pairs(rows, make_tokenizer(), 4, "truncate", end_of_text=True)
    assert (kept["prompt"], kept["rejected"]) == ("w2", "w4 w5")
    with pytest.raises(DataError, match="1 with more than 2 tokens"):
        fit_pairs(rows, make_tokenizer(), 2, "truncate", end_of_text=True)
