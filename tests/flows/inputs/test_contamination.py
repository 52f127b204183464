"""Prompts of the evaluation that are copies of training texts: found, left out, counted, listed."""

import json
from pathlib import Path
from random import Random

import pytest

from pipeline.evaluation.notes import note_on_copies
from pipeline.inputs.contamination import (
    COPIED,
    LEAST_CHANGED,
    LEAST_WORDS,
    find_copies,
    text_of,
    texts_in,
)
from pipeline.inputs.run_data import RunData
from pipeline.preflight.check_inputs import check_inputs
from pipeline.settings.make_settings import make_settings
from ppo_core.errors import DataError
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_rows
from tests.helpers.paths import SHARED

AI = "assistant"
WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]


def sentence(rng: Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def found(prompts, *training, max_overlap: float = 0.5) -> list[int]:
    return find_copies(prompts, [list(training)], max_overlap)


ASKED = "Don't tell the naïve fox; a well-known, old dog sleeps here!"


@pytest.mark.parametrize(
    "copy",
    [
        ASKED.upper(),
        "dont tell the naïve fox a well known old dog sleeps here",
        "don\u2019t tell the naïve fox: a wellknown OLD dog, sleeps here?",
        "Don't tell the nai\u0308ve fox; a well-known, old dog sleeps here!",
        "Don't tell the naïve fox;\n\n a  well-known,\u00a0old dog sleeps here",
        "**Don't** tell the `naïve` fox — a well-known, old dog \uff53leeps here",
        "“Don't tell the naïve fox; a well-known, old dog sleeps here …”",
    ],
)
def test_a_prompt_is_equal_without_case_punctuation_and_unicode_variants(copy: str):
    assert found([ASKED], "Something else.", copy) == [0]


@pytest.mark.parametrize(
    "other",
    [
        "Don't tell the naïve fox; a well-known, old dog sleeps",
        "Tell the fox that a dog sleeps here",
        "",
        "!!! ...",
    ],
)
def test_another_text_is_no_copy(other: str):
    assert found([ASKED, "", "..."], other) == []


def test_scripts_without_spaces_are_compared_by_characters():
    prompt = "今天天气很好\uff0c我们一起去公园散步\uff0c然后在湖边吃午饭吧"
    assert found([prompt], "前言。" + prompt.replace("\uff0c", " ") + "结束") == [0]
    assert found([prompt], "昨天下雨了\uff0c所以大家都留在家里看书\uff0c晚上才出去买东西") == []


@pytest.mark.parametrize("words", [LEAST_CHANGED, 20, 50, 200])
def test_a_copy_with_changed_words_within_a_longer_text_is_found(words: int):
    rng = Random(words)
    prompts = [sentence(rng, words) for _ in range(200)]
    training = []
    for prompt in prompts[:100]:
        changed = prompt.upper().split()
        for place in rng.sample(range(words), round(words / 10)):
            changed[place] = rng.choice(WORDS)
        training.append(f"{sentence(rng, 30)}, {' ... '.join(changed)}: {sentence(rng, 30)}")
    copies = found(prompts, *training)
    assert {*copies} <= {*range(100)} and len(copies) >= 95


def test_a_template_of_many_rows_is_no_copy():
    rng = Random(0)
    template = sentence(rng, 100)
    training = [f"{template} {sentence(rng, 20)}" for _ in range(50)]
    prompts = [f"{template} {sentence(rng, 20)}" for _ in range(20)]
    assert found(prompts, *training) == []
    assert found([*prompts, training[7].title()], *training) == [20]
    # Three rows alone could be copies, but the prompts show that the words are a template.
    assert found(prompts, *training[:3]) == []
    assert found([prompts[0]], *training[:3]) == [0]


def test_rows_with_equal_texts_are_one_text_and_no_template():
    rng = Random(0)
    prompt = sentence(rng, 30)
    copy = " ".join([*prompt.split()[:25], *sentence(rng, 5).split()])
    assert found([prompt], *[copy] * 1000) == [0]
    assert found([prompt] * 100, copy) == [*range(100)]


def test_a_shared_part_below_the_limit_is_no_copy():
    rng = Random(0)
    first, second = sentence(rng, 40), sentence(rng, 60)
    # 38 of the prompt's 98 n-grams are in the training text.
    assert found([f"{first} {second}"], first) == []
    assert found([f"{first} {second}"], first, max_overlap=0.3) == [0]
    # The halves of the prompt are in different texts.
    assert found([f"{first} {second}"], first, second[:150]) == []


def test_short_prompts_are_not_compared():
    assert found(["Once upon a time there was"], "Once upon a time there was") == []
    near = "Tom and Lily are brother and sister. They like"
    assert found([near], near.replace("Tom", "Ben")) == []


def test_a_shared_system_message_is_no_copy():
    system = {"role": "system", "content": sentence(Random(0), 60)}
    turns = [{"role": "user", "content": sentence(Random(n), 20)} for n in range(2)]
    assert found([[system, turns[0]]], text_of([system, turns[1]])) == []
    assert found([[system, turns[0]]], text_of([turns[0]])) == [0]
    assert found([[system]], text_of([system])) == [0]


def test_a_prompt_of_a_conversation_is_found_however_many_answers_it_has():
    rng = Random(0)
    prompts = [sentence(rng, LEAST_WORDS), sentence(rng, 35)]
    training = []
    for prompt in prompts:
        user = {"role": "user", "content": prompt}
        for _ in range(20):
            answer = {"role": "assistant", "content": sentence(rng, 30)}
            training += texts_in([{"role": "system", "content": "Be kind."}, user, answer])
    assert found(prompts, *training) == [0, 1]


def test_the_beginnings_of_a_long_conversation_are_no_template():
    rng = Random(0)
    talk = [
        {"role": role, "content": sentence(rng, 20)} for _ in range(12) for role in ("user", AI)
    ]
    whole, first = talk[:-1], talk[0]["content"]
    changed = " ".join([*first.split()[:18], *sentence(rng, 2).split()])
    assert found([first, whole, changed, talk[6]["content"]], *texts_in(talk)) == [0, 1, 2, 3]
    assert found([whole], *texts_in(whole)) == [0]


@pytest.mark.parametrize("name", ["sft_data", "preferences", "prompts"])
def test_copies_are_left_out_counted_and_listed(tmp_path: Path, capsys, name: str):
    table = tiny_table(tmp_path)
    asked = " ".join(f"w{n}" for n in range(10, 24))
    copy = {"sft_data": "prompt", "preferences": "rejected", "prompts": "prompt"}[name]
    path = Path(table[name])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_rows(path, [{**rows[0], copy: asked.upper().replace(" ", ", ")}, *rows])
    kept = [json.loads(line) for line in Path(table["eval_prompts"]).read_text().splitlines()]
    write_rows(Path(table["eval_prompts"]), [{"prompt": asked, "reference": "w1"}, *kept])
    # A list of an earlier run is removed.
    old = tmp_path / "outputs" / "quarantine" / "sft.jsonl"
    old.parent.mkdir(parents=True)
    old.write_text("old\n")
    settings = make_settings(table, {})
    check_inputs(settings)
    assert f"left out: 1 {COPIED}" in capsys.readouterr().out
    listed = (old.parent / "eval_prompts.jsonl").read_text().splitlines()
    (row,) = map(json.loads, listed)
    assert (row["row"], row["reason"], row["values"]["prompt"]) == (0, COPIED, asked)
    assert not old.exists()
    rows = RunData(settings).evaluation_rows()
    assert rows.column("prompt") == [row["prompt"] for row in kept]
    assert rows.left_out == {COPIED: 1} and rows.max_left_out == settings.max_left_out
    everything = RunData(make_settings(table | {"max_overlap": 1.0}, {})).evaluation_rows()
    assert len(everything) == len(kept) + 1 and not everything.left_out


def test_preferences_that_train_nothing_are_not_compared(tmp_path: Path):
    table = tiny_table(tmp_path)
    asked = " ".join(f"w{n}" for n in range(10, 24))
    pair = {"prompt": asked, "chosen": "w1", "rejected": "w2"}
    write_rows(Path(table["preferences"]), [pair, *[{**pair, "prompt": f"w{n}"} for n in range(9)]])
    write_rows(Path(table["eval_prompts"]), [{"prompt": asked, "reference": "w1"}] * 2)
    settings = make_settings({**table, "reward_model": table["policy"]}, {})
    assert len(RunData(settings).evaluation_rows()) == 2
    with pytest.raises(DataError, match=r"text of all 2 prompts is also in .* max_overlap=1"):
        RunData(make_settings(table, {})).evaluation_rows()


def test_the_report_says_how_many_prompts_were_left_out():
    assert note_on_copies(0) == []
    assert "training data: 3. quarantine/eval_prompts.jsonl" in note_on_copies(3)[0]


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (SHARED / name).read_text().splitlines()]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_real_copies_are_found_and_others_are_not():
    abstracts = [row["prompt"] for row in read("scitldr/test.jsonl")]
    training = [
        row["prompt"] for n in ("train", "validation") for row in read(f"scitldr/{n}.jsonl")
    ]
    # Nine abstracts of the test set are those of other submissions of the same papers.
    assert len(found(abstracts, *training)) == 9
    openings = [row["prompt"] for row in read("stories/prompts-eval.jsonl")]
    stories = [row["text"] for row in read("stories/text.jsonl")]
    assert found(openings, *stories) == []
    said = [row["chosen"] for row in read("sentiment-pairs/test.jsonl")]
    pairs = read("sentiment-pairs/train.jsonl")
    assert found(said, *(row[name] for row in pairs for name in ("chosen", "rejected"))) == []
