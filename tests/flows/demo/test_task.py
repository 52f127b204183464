"""The built-in task: the judge's verdicts by hand, what the files hold, how hard the task is."""

import json
from random import Random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.demo import task as task_module
from pipeline.demo.judge import grade, judge, read_facts
from pipeline.demo.posts import (
    CAREFUL,
    FAULTLESS,
    HURRIED,
    MAX_SUMMARY_WORDS,
    SLOTS,
    Writer,
    write_post,
    write_summary,
)
from pipeline.demo.task import build_demo_task, vocabulary

POST = (
    "title : a strange week . my boss was there too . sorry for the long post . "
    "it happened in paris . i felt angry . tl;dr :"
)
FACTS = {("my", "boss"), ("in", "paris"), ("felt", "angry")}
TEXT_FILES = (
    "sft.jsonl",
    "preferences-train.jsonl",
    "preferences-test.jsonl",
    "prompts-train.jsonl",
    "prompts-eval.jsonl",
)


def read_rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    build_demo_task(folder, seed=1)
    return folder


def test_every_prompt_has_a_reference(task):
    for name in ("prompts-train.jsonl", "prompts-eval.jsonl"):
        assert all(row["reference"].strip() for row in read_rows(task / name))


# --- The judge -------------------------------------------------------------------


def test_the_facts_of_a_post_leave_out_filler():
    assert read_facts(POST) == FACTS


@pytest.mark.parametrize(
    ("summary", "points"),
    [
        ("my boss in paris felt angry", 15),  # three facts
        ("felt angry my boss in paris", 15),  # in any order
        ("my boss felt angry", 10),  # one forgotten
        ("my boss in rome felt angry", 5),  # two facts, one invention
        ("my boss lost ring in paris felt angry", 10),  # three facts, one invention
        ("my boss my boss in paris felt angry", 13),  # two words said twice
        ("my boss in paris felt angry sorry for the long rant", 10),  # five needless words
        ("my boss in paris felt", 9),  # two facts, "felt" alone says nothing
        ("my paris boss", -3),  # a value without its word says nothing
        ("", 0),
    ],
)
def test_grades_done_by_hand(summary, points):
    assert grade(frozenset(FACTS), summary) == points


def test_verdicts_done_by_hand():
    whole, forgot, wrong = "my boss in paris felt angry", "my boss felt angry", "my boss in rome"
    pairs = [(whole, forgot), (wrong, forgot), (forgot, "my boss in paris"), ("", wrong)]
    # 15 > 10, 0 < 10, 10 = 10, 0 = 5 - 5
    assert judge([POST] * 4, pairs) == ["first", "second", "tie", "tie"]


def test_changing_places_turns_the_verdict_round():
    rng = Random(4)
    posts = [write_post(rng) for _ in range(50)]
    prompts = [post.prompt for post in posts]
    pairs = [(write_summary(p, CAREFUL, rng), write_summary(p, HURRIED, rng)) for p in posts]
    turned = {"first": "second", "second": "first", "tie": "tie"}
    swapped = judge(prompts, [(second, first) for first, second in pairs])
    assert swapped == [turned[verdict] for verdict in judge(prompts, pairs)]


def test_a_prompt_of_another_kind_is_invalid():
    assert judge(["Once upon a time"], [("a", "b")]) == ["invalid"]


def test_the_judge_reads_from_every_post_what_its_writer_meant():
    rng = Random(3)
    for post in (write_post(rng) for _ in range(500)):
        assert read_facts(post.prompt) == set(post.facts.items())


# --- The writers -----------------------------------------------------------------


def test_a_faultless_summary_gets_all_points():
    rng = Random(5)
    for post in (write_post(rng) for _ in range(200)):
        summary = write_summary(post, FAULTLESS, rng)
        assert grade(read_facts(post.prompt), summary) == 5 * len(post.facts)


@pytest.mark.parametrize(
    "fault", ["forgets", "mistakes", "invents", "repeats", "rambles", "quotes"]
)
def test_every_fault_costs_points(fault):
    rng = Random(6)
    for post in (write_post(rng) for _ in range(100)):
        summary = write_summary(post, Writer(**{fault: 1.0}), rng)
        assert grade(read_facts(post.prompt), summary) < 5 * len(post.facts)
        assert len(summary.split()) <= MAX_SUMMARY_WORDS


def share_won(writer: Writer, opponent: Writer) -> float:
    """Of 2000 posts, ties counting half: the standard error is below 0.012."""
    rng = Random(7)
    posts = [write_post(rng) for _ in range(2000)]
    pairs = [(write_summary(p, writer, rng), write_summary(p, opponent, rng)) for p in posts]
    verdicts = judge([post.prompt for post in posts], pairs)
    return (verdicts.count("first") + verdicts.count("tie") / 2) / len(verdicts)


def test_a_perfect_policy_can_beat_the_references():
    assert share_won(FAULTLESS, CAREFUL) >= 0.80


def test_who_copies_the_sft_writers_loses_to_the_references():
    assert 0.20 <= share_won(HURRIED, CAREFUL) <= 0.40


# --- The files -------------------------------------------------------------------


def test_files_hold_the_columns_and_enough_rows(task):
    columns = {name: {frozenset(row) for row in read_rows(task / name)} for name in TEXT_FILES}
    assert columns["sft.jsonl"] == {frozenset({"prompt", "completion"})}
    assert columns["prompts-eval.jsonl"] == {frozenset({"prompt", "reference"})}
    assert columns["prompts-train.jsonl"] == {frozenset({"prompt", "reference"})}
    for name in ("preferences-train.jsonl", "preferences-test.jsonl"):
        assert columns[name] == {frozenset({"prompt", "chosen", "rejected"})}
    assert len(read_rows(task / "prompts-eval.jsonl")) >= 512
    assert len(read_rows(task / "preferences-test.jsonl")) >= 1000
    assert len(read_rows(task / "prompts-train.jsonl")) >= 4000


def test_no_post_occurs_twice_in_all_the_files(task):
    prompts = [row["prompt"] for name in TEXT_FILES for row in read_rows(task / name)]
    assert len(set(prompts)) == len(prompts)


def test_raters_mostly_agree_with_the_judge_and_not_always(task):
    rows = read_rows(task / "preferences-test.jsonl")
    pairs = [(row["chosen"], row["rejected"]) for row in rows]
    verdicts = judge([row["prompt"] for row in rows], pairs)
    decided = len(verdicts) - verdicts.count("tie")
    assert 0.88 <= verdicts.count("first") / decided <= 0.98


def test_the_model_is_small_and_its_tokenizer_knows_every_word(task):
    tokenizer = AutoTokenizer.from_pretrained(task / "base")
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert len(tokenizer) == len(vocabulary())
    for row in read_rows(task / "prompts-eval.jsonl"):
        for text in row.values():
            ids = tokenizer(text)["input_ids"]
            assert ids[0] == tokenizer.bos_token_id
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids, skip_special_tokens=True) == text
            assert len(ids) <= 64
    model = AutoModelForCausalLM.from_pretrained(task / "base")
    assert 400_000 <= model.num_parameters() <= 1_000_000
    assert (task / "base" / "model.safetensors").exists()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(task, tmp_path, monkeypatch):
    for name in ("NUM_SFT_EXAMPLES", "NUM_TRAIN_PAIRS", "NUM_TRAIN_PROMPTS", "NUM_TEST_PAIRS"):
        monkeypatch.setattr(task_module, name, 20)
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_demo_task(tmp_path / folder, seed)
    for name in (*TEXT_FILES, "base/model.safetensors"):
        a, b, c = ((tmp_path / folder / name).read_bytes() for folder in "abc")
        assert a == b
        assert a != c


def test_values_belong_to_one_slot_and_are_no_slot_words():
    values = [value for slot in SLOTS for value in slot.values]
    assert len(set(values)) == len(values)
    assert not {slot.word for slot in SLOTS} & set(values)
