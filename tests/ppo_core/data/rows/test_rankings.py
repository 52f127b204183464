"""Ranked lists and single judgements give pairs."""

from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from ppo_core.config.row_settings import ReadOptions
from ppo_core.data.rows.rankings import MAX_PAIRS, MAX_RANKED, pairs_of_ranking
from ppo_core.data.rows.read_rows import read_rows
from ppo_core.errors import DataError
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.inputs.rows import plain, rows_of

Pair = tuple[str, str]


def pairs(rows: list[dict[str, Any]], *, is_chat: bool = False) -> list[tuple[Any, ...]]:
    read = rows_of("pairs", rows, is_chat=is_chat)
    return [(row["prompt"], row["chosen"], row["rejected"]) for row in plain(read)]


ASSISTANT = {"role": "assistant"}

RANKED: dict[str, dict[str, Any]] = {
    "ranks": {"responses": ["b", "a", "c"], "ranks": [2, 1, 3]},
    "rank": {"responses": ["b", "a", "c"], "rank": [2, 1, 3]},
    "ranks from 0": {"completions": ["b", "a", "c"], "ranks": [1, 0, 2]},
    "scores": {"responses": ["b", "a", "c"], "scores": [0.5, 2, -1.0]},
    "ratings": {"completions": ["b", "a", "c"], "ratings": [3, 5, 1]},
    "ranks beside scores": {"responses": ["b", "a", "c"], "ranks": [2, 1, 3], "scores": [9, 1, 5]},
    "UltraFeedback": {
        "completions": [
            {"model": "x", "response": text, "overall_score": score}
            for text, score in (("b", 7.0), ("a", 9), ("c", 1.5))
        ]
    },
    "messages": {
        "responses": [[{**ASSISTANT, "content": text}] for text in "bac"],
        "scores": [2, 3, 1],
    },
    "messages of parts": {
        "responses": [{**ASSISTANT, "content": [{"type": "text", "text": t}]} for t in "bac"],
        "scores": [2, 3, 1],
    },
    "ShareGPT": {"responses": [{"from": "gpt", "value": t} for t in "bac"], "scores": [2, 3, 1]},
}


@pytest.mark.parametrize("prompt", ["prompt", "question", "instruction"])
@pytest.mark.parametrize("form", RANKED)
def test_each_better_answer_is_preferred_to_each_worse_one(form, prompt):
    row = {prompt: "q", **RANKED[form]}
    better = [("a", "b"), ("a", "c"), ("b", "c")]
    assert pairs([row]) == [("q", *pair) for pair in better]
    asked = [{"role": "user", "content": "q"}]
    assert pairs([row], is_chat=True) == [(asked, *pair) for pair in better]
    assert [one["reference"] for one in rows_of("prompts", [row])] == [None]


def test_equally_good_answers_and_equal_answers_are_ties():
    row = {"prompt": "q", "responses": ["a", "b", "c", "a"], "scores": [2, 2, 1, 1]}
    read = plain(rows_of("pairs", [row]))
    assert [(one["chosen"], one["rejected"]) for one in read if one["tie"]] == [
        ("a", "b"),
        ("a", "a"),
        ("c", "a"),
    ]
    assert [(one["chosen"], one["rejected"]) for one in read if not one["tie"]] == [
        ("a", "c"),
        ("b", "c"),
        ("b", "a"),
    ]
    assert all("margin" not in one for one in read)


def test_the_labels_of_a_list_are_those_of_its_pairs():
    row = {"prompt": "q", **RANKED["ranks"], "source": "web", "annotator": 7}
    read = plain(rows_of("pairs", [row]))
    assert {(one["source"], one["annotator"]) for one in read} == {("web", "7")}


def test_the_pairs_of_a_list_have_its_number(tmp_path: Path):
    rows = [{"prompt": f"q{n}", **RANKED["ranks"]} for n in range(4)]
    read = read_rows(write_rows(tmp_path / "ranked.jsonl", rows), "pairs")
    assert read.column("row") == [number for number in range(4) for _ in range(3)]
    assert read.reading == {"prompt": "prompt", "responses": "responses", "ranks": "ranks"}


def test_of_a_long_list_some_answers_are_paired_the_best_and_the_worst_among_them():
    count = 100
    texts, scores = [f"r{n}" for n in range(count)], list(range(count))
    found = list(pairs_of_ranking(texts, scores=scores))
    assert len(found) == MAX_PAIRS == len(list(combinations(range(MAX_RANKED), 2)))
    assert not any(tie for _, _, tie in found)
    assert all(int(better[1:]) > int(worse[1:]) for better, worse, _ in found)
    named = {text for better, worse, _ in found for text in (better, worse)}
    assert len(named) == MAX_RANKED and {"r0", "r99"} <= named


# --- Single judgements -------------------------------------------------------------


def judged(prompt: Any, completion: Any, label: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


def test_each_preferred_completion_of_a_prompt_is_paired_with_each_rejected_one():
    rows = [
        judged("q", "a", True),
        judged("r", "e", False),
        judged("q", "c", False),
        judged("q", "b", True),
        judged("q", "d", False),
        judged("r", "f", True),
    ]
    first, second = [("a", "c"), ("b", "d"), ("a", "d"), ("b", "c")], [("f", "e")]
    assert pairs(rows) == [
        *(("q", *pair) for pair in first),
        *(("r", *pair) for pair in second),
    ]
    # The pairs of a prompt are together, at the place of its first judgement.
    assert rows_of("pairs", rows).column("row") == [0, 0, 0, 0, 1]
    asked = pairs(rows, is_chat=True)[-1]
    assert asked == ([{"role": "user", "content": "r"}], "f", "e")


@pytest.mark.parametrize(("yes", "no"), [(True, False), ("true", "false"), ("True", "False")])
def test_labels_and_messages_of_any_form_are_read(yes, no):
    asked = [{"from": "human", "value": "q"}]
    rows = [
        judged(asked, {"from": "gpt", "value": "a"}, yes),
        judged([{"role": "user", "content": "q"}], [{**ASSISTANT, "content": "b"}], no),
    ]
    assert pairs(rows, is_chat=True) == [([{"role": "user", "content": "q"}], "a", "b")]


def test_a_judgement_without_another_one_is_left_out_with_a_reason(tmp_path: Path):
    rows = [judged(f"q{n // 2}", f"a{n}", n % 2 == 0) for n in range(300)]
    rows += [judged("alone", "a", True), judged("alone", "b", True), judged("other", "c", False)]
    path = write_rows(tmp_path / "judged.jsonl", rows)
    read = read_rows(path, "pairs")
    assert len(read) == 150
    assert read.left_out == {
        "whose prompt has no rejected completion (column label)": 2,
        "whose prompt has no preferred completion (column label)": 1,
    }
    with pytest.raises(
        DataError,
        match=r"3 of the 303 rows .* cannot be used: 2 whose prompt has no rejected completion "
        r"\(column label\), 1 whose .* set max_left_out=0.01 to",
    ):
        read_rows(path, "pairs", options=ReadOptions(max_left_out=0.005))


def test_a_faulty_judgement_counts_with_the_unpaired_ones():
    rows = [judged("q", "a", True), judged("q", "b", False)] * 100
    read = rows_of("pairs", [*rows, judged("q", 7, True), judged("alone", "a", True)])
    assert len(read.left_out) == 2 and sum(read.left_out.values()) == 2
    with pytest.raises(DataError, match=r"Rows left out before: 1 "):
        rows_of("pairs", [*rows, judged("q", 7, True), *[judged("alone", "a", True)] * 2])


def test_a_prompt_with_many_judgements_has_a_limited_number_of_pairs():
    rows = [judged("q", f"y{n}", True) for n in range(40)]
    rows += [judged("q", f"n{n}", False) for n in range(15)]
    found = pairs(rows)
    assert len(set(found)) == len(found) == MAX_PAIRS
    # Each judgement is in about as many pairs as the others.
    assert {*Counter(pair[1] for pair in found).values()} == {3}
    assert {*Counter(pair[2] for pair in found).values()} <= {6, 7, 8, 9}


def test_equal_completions_with_both_labels_are_a_tie():
    (read,) = plain(rows_of("pairs", [judged("q", "a", True), judged("q", "a", False)]))
    assert read["tie"] is True


def test_prompts_of_judgements_have_no_reference_and_only_preferred_ones_are_demonstrations():
    rows = [judged("q", "a", True), judged("q", "b", False)]
    assert [row["reference"] for row in rows_of("prompts", rows)] == [None, None]
    assert plain(rows_of("demonstrations", rows[:1])) == [{"prompt": "q", "completion": "a"}]
    with pytest.raises(DataError, match=r"rejected completion .*Keep the rows whose label is true"):
        rows_of("demonstrations", rows)


@pytest.mark.parametrize("label", [False, "False", 0, 0.0, "0"])
def test_no_rejected_completion_is_a_demonstration(label: object):
    rows = [judged("q", "a", 1), judged("q", "b", label)]
    assert plain(rows_of("demonstrations", rows[:1])) == [{"prompt": "q", "completion": "a"}]
    with pytest.raises(DataError, match=rf"rejected completion \(label {label}\)"):
        rows_of("demonstrations", rows)
