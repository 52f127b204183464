import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.inputs.run_data import RunData, references_of
from pipeline.preflight.check_inputs import check_inputs, check_outputs
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.stages.start import prepare_inputs
from pipeline.tracking.mlflow_client import check_registry
from ppo_core.data.rows.row_columns import Row
from ppo_core.errors import ConfigError, DataError, ModelError, PPOError
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_model, write_rows
from tests.helpers.inputs.rows import plain
from tests.helpers.models.tiny import make_tokenizer


def check(folder: Path, **changes: Any) -> None:
    check_inputs(make_settings({**tiny_table(folder), **changes}, {}))


def test_inputs_that_fit_pass_and_are_counted(tmp_path: Path, capsys):
    check(tmp_path)
    told = capsys.readouterr().out
    for name, count in (("prompts", 32), ("preferences", 58), ("preferences-test", 6), ("sft", 16)):
        assert re.search(rf"^{name}: .*: {count} rows, reading prompt, ", told, re.MULTILINE)


def test_pairs_are_held_out_only_where_none_were_brought(tmp_path: Path):
    table = tiny_table(tmp_path)
    settings = make_settings(table, {})
    assert plain([*RunData(settings).training_pairs(), *RunData(settings).test_pairs()]) == [
        json.loads(line) for line in Path(table["preferences"]).read_text().splitlines()
    ]
    other = write_rows(tmp_path / "test.jsonl", [{"chosen": "w1", "rejected": "w2"}] * 3)
    own = make_settings({**table, "preferences_test": other}, {})
    assert len(RunData(own).training_pairs()) == 64
    assert len(RunData(own).test_pairs()) == 3


def test_the_pairs_of_one_ranked_list_are_held_out_together(tmp_path: Path):
    ranked = [
        {"prompt": f"w{n}", "responses": ["w1", "w2", "w3", "w4"], "ranks": [1, 2, 3, 4]}
        for n in range(10)
    ]
    judged = [
        {"prompt": f"w{n % 10}", "completion": f"w{n}", "label": n % 20 < 10} for n in range(50)
    ]
    table = tiny_table(tmp_path)
    for rows in (ranked, judged):
        # 60 pairs of 10 prompts; a cut after 51 of them would be in the ninth list.
        path = write_rows(tmp_path / "pairs.jsonl", rows)
        settings = make_settings(table | {"preferences": path, "held_out_share": 0.15}, {})
        parts = [RunData(settings).training_pairs(), RunData(settings).test_pairs()]
        trained, tested = (set(part.column("prompt")) for part in parts)
        assert tested and trained and not trained & tested
        assert trained | tested == {f"w{n}" for n in range(10)}
        one = write_rows(tmp_path / "one.jsonl", [row for row in rows if row["prompt"] == "w1"])
        with pytest.raises(DataError, match="has the pairs of one prompt, so none can be held out"):
            RunData(make_settings(table | {"preferences": one}, {})).training_pairs()


def test_no_pair_is_trained_on_that_the_model_is_validated_on(tmp_path: Path):
    # The first and the last of ten rows are votes on one pair: too many for a tenth.
    rows = [{"prompt": f"w{i}", "chosen": "w1", "rejected": "w2"} for i in range(9)]
    rows.append({"prompt": "w0", "chosen": "w2", "rejected": "w1"})
    table = tiny_table(tmp_path) | {"preferences": write_rows(tmp_path / "votes.jsonl", rows)}
    settings = make_settings(table, {})
    assert plain(RunData(settings).training_pairs()) == [*rows[:8], rows[9]]
    assert plain(RunData(settings).test_pairs()) == [rows[8]]
    with pytest.raises(DataError, match="no pair is left to train the reward model on"):
        check(tmp_path, preferences=table["preferences"], preferences_test=table["preferences"])


def test_labels_of_preferences_are_read_and_not_trained_on(tmp_path: Path):
    rows = [
        {"prompt": "w1", "chosen": f"w{i}", "rejected": "w2", "margin": 1.5, "tie": i == 3}
        for i in range(3, 23)
    ]
    settings = make_settings(
        tiny_table(tmp_path) | {"preferences": write_rows(tmp_path / "rated.jsonl", rows)}, {}
    )
    assert plain(RunData(settings).test_pairs()) == rows[18:]
    assert plain(RunData(settings).training_pairs()) == [
        {name: row[name] for name in ("prompt", "chosen", "rejected")} for row in rows[1:18]
    ]


@pytest.mark.usefixtures("mlflow_client")
def test_each_run_keeps_the_rows_that_it_set_aside(tmp_path: Path):
    rows = [{"prompt": "w1"} for _ in range(200)] + [{"prompt": ""}]
    table = tiny_table(tmp_path) | {"prompts": write_rows(tmp_path / "p.jsonl", rows)}
    for number in ("1", "2"):
        settings = prepare_inputs(make_settings(table, {}), number)
    kept = Path(settings.output_dir).glob("runs/*/quarantine/prompts.jsonl")
    assert sorted(path.parts[-3] for path in kept) == ["1", "2"]


def test_rows_set_aside_can_be_read(tmp_path: Path):
    rows = [{"prompt": "w1"} for _ in range(200)] + [{"prompt": ""}]
    check(tmp_path, prompts=write_rows(tmp_path / "p.jsonl", rows))
    kept = (tmp_path / "outputs" / "quarantine" / "prompts.jsonl").read_text()
    assert json.loads(kept) == {
        "row": 200,
        "reason": "with an empty prompt",
        "values": {"prompt": ""},
    }


def test_the_rows_of_a_refused_data_set_can_be_read(tmp_path: Path):
    rows = [{"prompt": "w1"}] * 200 + [{"prompt": ""}, *[{"prompt": "w1 " * 99}] * 3]
    path = tmp_path / "outputs" / "quarantine" / "refused.jsonl"
    says = rf"^'prompts': 3 of the 203 rows .* row 201, .* to go on .* left out are in {path}\.$"
    with pytest.raises(DataError, match=says):
        check(tmp_path, prompts=write_rows(tmp_path / "p.jsonl", rows), overlong="drop")
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["row"] for row in kept] == [200, 201, 202, 203]
    check(tmp_path)
    assert not path.exists()


LEFT_OUT = {
    "sft_data": {"prompt": "w1", "completion": 7},
    "preferences": {"prompt": "w1", "chosen": "w2", "rejected": 7},
    "preferences_test": {"prompt": "w1", "chosen": "w2", "rejected": 7},
    "prompts": {"prompt": 7},
    "eval_prompts": {"prompt": 7, "reference": "w1"},
    "human_labels": {"prompt": "w1", "first": "w2", "second": 7, "label": "tie"},
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_limit_of_rows_left_out_is_that_of_every_data_set(tmp_path: Path, name: str):
    table = tiny_table(tmp_path)
    file = Path(table.get(name, tmp_path / "more.jsonl"))
    kept = {
        "human_labels": {"prompt": "w1", "first": "w2", "second": "w1", "label": "tie"},
        "preferences_test": {"prompt": "w1", "chosen": "w2", "rejected": "w1"},
    }
    if name in kept:
        write_rows(file, [kept[name]] * 15)
    with file.open("a") as text:
        text.write(json.dumps(LEFT_OUT[name]) + "\n")
    named = {"evaluation": {name: str(file)}} if name == "human_labels" else {name: str(file)}
    refused = rf"^'{name}': .*{file.name}' cannot be used: 1 .* set max_left_out=0.0"
    with pytest.raises(DataError, match=refused):
        check_inputs(make_settings(table | named, {}))
    check_inputs(make_settings(table | named | {"max_left_out": 0.1}, {}))


@pytest.mark.parametrize("name", ["prompts", "eval_prompts"])
def test_a_prompt_that_leaves_no_room_is_refused(tmp_path: Path, name: str):
    # context 64, response_length 6: a prompt may have 58 tokens
    fits = {"prompt": " ".join(["w1"] * 58), "reference": "w1"}
    check(tmp_path, **{name: write_rows(tmp_path / "p.jsonl", [fits])})
    long = {"prompt": " ".join(["w1"] * 59), "reference": "w1"}
    message = rf"'{name}': 1 of the 2 rows .*with more than 58 tokens.*shorten or remove"
    with pytest.raises(DataError, match=message):
        check(tmp_path, **{name: write_rows(tmp_path / "p.jsonl", [fits, long])})


def test_pairs_longer_than_the_training_takes_are_refused(tmp_path: Path):
    pair = {"prompt": "w1 " * 20, "chosen": "w1 " * 20, "rejected": "w2"}
    with pytest.raises(
        DataError, match=r"'preferences': 2 of the 5 rows .*with more than 32 tokens.*max_length"
    ):
        check(
            tmp_path,
            preferences=write_rows(tmp_path / "p.jsonl", [pair, pair, *[SHORT] * 3]),
            preferences_test=write_rows(tmp_path / "t.jsonl", [{**SHORT, "prompt": "w2"}]),
        )


@pytest.mark.parametrize(
    "reference", [{}, {"reference": None}, {"reference": ""}, {"reference": " "}]
)
def test_evaluation_prompts_without_any_reference_are_judged_without(
    tmp_path: Path, reference: dict[str, Any], capsys
):
    rows = [{"prompt": f"w{i}", **reference} for i in range(4)]
    table = tiny_table(tmp_path) | {"eval_prompts": write_rows(tmp_path / "e.jsonl", rows)}
    check_inputs(make_settings(table, {}))
    assert "eval_prompts: There are no references, so the policies" in capsys.readouterr().out
    assert references_of(RunData(make_settings(table, {})).examples()) is None


@pytest.mark.parametrize("missing", [None, "", " "])
@pytest.mark.parametrize("name", ["eval_prompts", "prompts"])
def test_references_of_only_some_evaluation_prompts_are_refused(
    tmp_path: Path, name: str, missing: str | None
):
    # The last 2 of 20 prompts are those of the evaluation if none are named.
    rows = [{"prompt": f"w{i}", "reference": "w1" if i % 2 else missing} for i in range(20)]
    changes = {"eval_prompts": "", name: write_rows(tmp_path / "e.jsonl", rows)}
    counts = {"eval_prompts": "10 of the 20", "prompts": "1 of the 2"}
    with pytest.raises(DataError, match=f"^'{name}': {counts[name]} rows of .* have no reference"):
        check(tmp_path, **changes)


def test_an_empty_cell_of_a_csv_file_is_no_reference(tmp_path: Path):
    file = tmp_path / "e.csv"
    file.write_text("prompt,reference\nw1,w2\nw3,\n")
    with pytest.raises(DataError, match=r"^'eval_prompts': 1 of the 2 rows of .* no reference"):
        check(tmp_path, eval_prompts=str(file))
    file.write_text("prompt,reference\nw1,\nw3,\n")
    data = RunData(make_settings(tiny_table(tmp_path) | {"eval_prompts": str(file)}, {}))
    assert references_of(data.examples()) is None


# --- Without evaluation prompts of their own ------------------------------------------


def without_evaluation(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Settings:
    table = {**tiny_table(folder), "eval_prompts": "", **changes}
    return make_settings(table | {"prompts": write_rows(folder / "p.jsonl", rows)}, {})


def split(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> tuple[list[str], list[str]]:
    """The prompts that PPO trains on, and those of the evaluation."""
    data = RunData(without_evaluation(folder, rows, **changes))
    return data.training_prompts().column("prompt"), data.evaluation_rows().column("prompt")


@pytest.mark.parametrize(
    ("count", "changes", "split_off"),
    [
        (20, {}, 2),  # 10 % of 20
        (20, {"held_out_share": 0.25}, 5),
        (20, {"held_out_share": 0.25, "evaluation": {"num_examples": 3}}, 3),
        (4, {}, 1),  # at least one
        (2, {"held_out_share": 0.9}, 1),  # and one to train on
    ],
)
def test_evaluation_prompts_are_the_last_of_the_prompts(
    tmp_path: Path, count: int, changes: dict[str, Any], split_off: int
):
    names = [f"w{i}" for i in range(count)]
    trained, judged = split(tmp_path, [{"prompt": name} for name in names], **changes)
    assert (trained, judged) == (names[:-split_off], names[-split_off:])


def test_a_part_of_the_judged_prompts_is_drawn_for_each_champion(tmp_path: Path):
    table = tiny_table(tmp_path) | {"eval_prompts": str(tmp_path / "forty.jsonl")}
    write_rows(tmp_path / "forty.jsonl", [{"prompt": f"w{i}"} for i in range(40)])
    table["evaluation"] = {"num_examples": 20, "rotate": 0.5}
    data = RunData(make_settings(table, {}))

    def prompts(champion: int | None) -> list[str]:
        return [row["prompt"] for row in data.examples(champion)]

    drawn = [prompts(champion)[10:] for champion in (None, 1, 2, 3)]
    for champion, own in zip((None, 1, 2, 3), drawn, strict=True):
        assert prompts(champion) == [f"w{i}" for i in range(10)] + own
        assert len(set(own)) == 10
        assert not set(own) & {f"w{i}" for i in range(10)}
    assert len({tuple(own) for own in drawn}) == 4


def test_prompts_with_another_system_message_are_copies_of_prompts_of_the_evaluation(
    tmp_path: Path,
):
    table = tiny_table(tmp_path) | {"selection": {"method": "judge"}}
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] }} {% endfor %}"
    tokenizer.save_pretrained(table["policy"])

    def asked(system: str, number: int) -> dict[str, Any]:
        user = " ".join(f"w{number + word}" for word in range(8))
        talk = (("system", system), ("user", user))
        return {"prompt": [{"role": role, "content": text} for role, text in talk]}

    # The judge chooses on the first 30 rows; the last 10 repeat the user turns of the first 10.
    rows = [asked("w1", n) for n in range(50)] + [asked("w2", n) for n in range(10)]
    table["eval_prompts"] = write_rows(tmp_path / "chats.jsonl", rows)

    def user_turns(**changes: Any) -> tuple[set[str], set[str]]:
        data = RunData(make_settings(table | changes, {}))
        parts = (data.selection_prompts(), data.evaluation_rows().column("prompt"))
        chosen, judged = ({prompt[-1]["content"] for prompt in part} for part in parts)
        return chosen, judged

    chosen, judged = user_turns()
    assert (len(chosen), len(judged), chosen & judged) == (20, 30, set())
    chosen, judged = user_turns(max_overlap=1.0)
    assert (len(chosen), len(judged), len(chosen & judged)) == (30, 30, 10)


def test_a_rotation_without_further_rows_is_refused(tmp_path: Path):
    prompts = [f"w{i}" for i in range(41)]

    def examples(rows: int, judged: int) -> list[Row]:
        file = write_rows(tmp_path / "rotated.jsonl", [{"prompt": name} for name in prompts[:rows]])
        evaluation = {"num_examples": judged, "rotate": 0.5}
        table = tiny_table(tmp_path) | {"eval_prompts": file, "evaluation": evaluation}
        return RunData(make_settings(table, {})).examples()

    for judged, advice in (
        (1000, r"Add at least 1460 rows to eval_prompts, lower num_examples to 26"),
        (27, r"Add at least 1 rows to eval_prompts, lower num_examples to 26"),
    ):
        with pytest.raises(DataError, match=rf"drawn rows would repeat. {advice}"):
            examples(40, judged)
    # Both pieces of advice are right.
    assert len(examples(40, 26)) == 26
    assert len(examples(41, 27)) == 27


def test_a_rotation_of_prompts_that_are_held_out_is_refused(tmp_path: Path):
    table = tiny_table(tmp_path) | {"eval_prompts": ""}
    table["evaluation"] = {"num_examples": 4, "rotate": 0.5}
    with pytest.raises(ConfigError, match=r"rotate=0\.5 .* Name eval_prompts, or remove rotate"):
        make_settings(table, {})


def test_ppo_trains_on_no_prompt_that_is_judged(tmp_path: Path):
    # Rows 3 and 8 are the last prompt, too.
    rows = [{"prompt": "w50" if i in (3, 8, 19) else f"w{i}"} for i in range(20)]
    trained, judged = split(tmp_path, rows)
    assert judged == ["w18", "w50"]
    assert trained == [f"w{i}" for i in range(18) if i not in (3, 8)]
    source = RunData(without_evaluation(tmp_path, rows)).training_prompts().source
    assert source.endswith("(first 18), without 2 prompts of the evaluation")


def test_prompts_that_are_equal_after_they_are_shortened_are_not_trained_on(tmp_path: Path):
    # Context 64, response_length 6: both long prompts are shortened to the last 58 words.
    rows = [
        {"prompt": f"w{i} " + "w1 " * 58} if i in (0, 9) else {"prompt": "w2"} for i in range(10)
    ]
    trained, (judged,) = split(tmp_path, rows, overlong="truncate")
    assert len(judged.split()) == 58
    assert trained == ["w2"] * 8


def test_prompts_split_off_are_printed(tmp_path: Path, capsys):
    check(tmp_path, eval_prompts="")
    told = capsys.readouterr().out
    assert re.search(
        r"^prompts: .*\(first 29\): 29 rows, reading prompt, digest", told, re.MULTILINE
    )
    assert re.search(r"^eval_prompts: .*\(last 3\): 3 rows, reading", told, re.MULTILINE)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "w1"}], r"^'prompts': .* has one row, so none can be held out"),
        ([{"prompt": "w1"}] * 5, r"no prompt is left to train on, because all are equal"),
    ],
)
def test_too_few_prompts_to_split_are_refused(tmp_path: Path, rows: list[Any], message: str):
    with pytest.raises(DataError, match=message):
        check(tmp_path, eval_prompts="", prompts=write_rows(tmp_path / "p.jsonl", rows))


# --- Without a judge ------------------------------------------------------------------


def pairs_of(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"w{i}", "chosen": "w1", "rejected": "w2"} for i in range(count)]


def test_without_a_judge_a_third_of_the_pairs_is_for_one(tmp_path: Path, capsys):
    rows = pairs_of(10)
    preferences = write_rows(tmp_path / "ten.jsonl", rows)
    table = {**tiny_table(tmp_path), "judge": "", "preferences": preferences}
    settings = make_settings(table, {})
    # The last of ten is held out; of nine, every third is the judge's.
    assert plain(RunData(settings).judge_pairs()) == [rows[2], rows[5], rows[8]]
    assert plain(RunData(settings).training_pairs()) == [rows[i] for i in (0, 1, 3, 4, 6, 7)]
    check_inputs(settings)
    assert re.search(r"^judge-preferences: .*: 3 rows", capsys.readouterr().out, re.MULTILINE)
    named = make_settings({**table, "judge": "rule"}, {})
    assert plain(RunData(named).training_pairs()) == rows[:9]


def test_the_judge_of_a_given_reward_model_learns_from_all_pairs(tmp_path: Path):
    rows = pairs_of(10)
    table = tiny_table(tmp_path) | {
        "judge": "",
        "reward_model": write_model(tmp_path / "rm", labels=1),
        "preferences": write_rows(tmp_path / "ten.jsonl", rows),
    }
    settings = make_settings(table, {})
    check_inputs(settings)
    data = RunData(settings)
    assert plain(data.judge_pairs()) == rows[:9]
    assert "preferences" not in data.by_use()
    assert data.by_use()["judge-preferences"].digest == data.judge_pairs().digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sft": {"learning_rate": "auto"}}, r"\[sft\]: learning_rate='auto' is for reward"),
        ({"sft": {"offload": True}}, r"\[sft\]: offload=True has no effect"),
        (
            {"sft": {"sharding": "none"}, "processes": 2},
            r"\[sft\]: sharding='none' is for one process, but 2 processes",
        ),
        (
            {"sft": {"sharding": "none"}, "processes": 1, "num_nodes": 2},
            r"\[sft\]: sharding='none' is for one process, but 2 processes",
        ),
        (
            {"reward_model_training": {"learning_rate": "auto", "sharding": "zero2"}},
            r"\[reward_model_training\]: learning_rate='auto' trains several models",
        ),
        (
            {
                "reward_model": "given",
                "fresh_pairs": {"count": 30, "labeller": "rule"},
                "reward_model_training": {"offload": True},
            },
            r"\[reward_model_training\]: offload=True has no effect",
        ),
        (
            {"reward_model_training": {"completion_only_loss": False}},
            r"\[reward_model_training\]: completion_only_loss=False is for SFT",
        ),
    ],
)
def test_settings_of_a_training_that_contradict_each_other_are_refused_at_the_start(
    tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, **changes)


def test_too_few_pairs_for_a_judge_are_refused(tmp_path: Path):
    changes = {"judge": "", "preferences": write_rows(tmp_path / "few.jsonl", pairs_of(3))}
    message = r"^'preferences': .*2 training rows contain fewer than 3 .*name a judge"
    with pytest.raises(DataError, match=message):
        check(tmp_path, **changes)


def test_columns_of_other_names_are_read_and_a_wrong_name_is_refused(tmp_path: Path):
    posts = write_rows(tmp_path / "posts.jsonl", [{"post": "w1"}, {"post": "w2"}])
    check(tmp_path, prompts=posts, columns={"prompt": "post"})
    rows = [{"prompt": "w1", "summary": "w2", "spare": None}, {"prompt": "w2", "spare": "w3"}]
    both = write_rows(tmp_path / "both.jsonl", rows)
    check(tmp_path, prompts=both, columns={"reference": "summary", "completion": "spare"})
    with pytest.raises(ConfigError, match="reference=sumary was not used: no data set"):
        check(tmp_path, columns={"reference": "sumary"})
    # No file of votes is read, which could have this column.
    with pytest.raises(ConfigError, match="label=winner was not used"):
        check(tmp_path, columns={"label": "winner"})


def test_a_pair_that_is_shortened_for_validation_is_not_trained_on(tmp_path: Path):
    long = {"prompt": "w1 " * 70, "chosen": "w1", "rejected": "w2"}
    rows = [{"prompt": f"w{i}", "chosen": "w1", "rejected": "w2"} for i in range(9)]
    settings = make_settings(
        {
            **tiny_table(tmp_path),
            "preferences": write_rows(tmp_path / "p.jsonl", [*rows, long]),
            "preferences_test": write_rows(tmp_path / "t.jsonl", [long]),
            "overlong": "truncate",
        },
        {},
    )
    assert len(RunData(settings).test_pairs().table[0]["prompt"].split()) < 70
    assert plain(RunData(settings).training_pairs()) == rows


SHORT = {"prompt": "w1", "chosen": "w1", "rejected": "w2"}


def test_a_reward_model_with_several_labels_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="has 3 labels"):
        check(tmp_path, reward_model=write_model(tmp_path / "rm", labels=3))


def test_a_reward_model_whose_texts_cannot_end_as_they_are_set_to_is_refused(tmp_path: Path):
    path = write_model(tmp_path / "rm", labels=1)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(path)
    with pytest.raises(ModelError, match=r"has no end-of-sequence token, .*end_of_text = false"):
        check(tmp_path, reward_model=path)
    check(tmp_path, reward_model=path, reward_model_training={"end_of_text": False})


def test_held_out_pairs_that_the_reward_model_cannot_read_are_refused(tmp_path: Path):
    # Context 64: 62 words of a prompt, one of a response, and the end-of-sequence token.
    path = write_model(tmp_path / "rm", labels=1)

    def check_pair(prompt: str, chosen: str, **training: bool) -> None:
        pairs = [{"prompt": prompt, "chosen": chosen, "rejected": "w2"}]
        check(
            tmp_path,
            reward_model=path,
            reward_model_training=training,
            preferences_test=write_rows(tmp_path / "test.jsonl", pairs),
        )

    check_pair("w1 " * 62, "w1")
    with pytest.raises(
        DataError, match=r"1 with more than 64 tokens.*the reward model cannot read"
    ):
        check_pair("w1 " * 63, "w1")
    check_pair("", "")
    with pytest.raises(DataError, match=r"1 without tokens"):
        check_pair("", "", end_of_text=False)


def test_held_out_pairs_without_any_preference_are_refused(tmp_path: Path):
    ties = [{**SHORT, "tie": True}, {**SHORT, "chosen": "w3", "rejected": "w3", "tie": None}]
    pairs = write_rows(tmp_path / "test.jsonl", ties)
    says = (
        r"The 2 held-out .*test\.jsonl are all ties, .* measured\. In 1 of them, chosen and "
        r"rejected have the same text; check that .* two different columns\. Add preferences"
    )
    with pytest.raises(DataError, match=says):
        check(tmp_path, preferences_test=pairs)
    with pytest.raises(DataError, match=r"1 held-out .* cannot be measured\. Add preferences"):
        check(tmp_path, preferences_test=write_rows(tmp_path / "one.jsonl", ties[:1]))


def test_a_language_model_is_no_reward_model(tmp_path: Path):
    with pytest.raises(ModelError, match=r"not a .*ForSequenceClassification"):
        check(tmp_path, reward_model=write_model(tmp_path / "lm"))


def test_the_reward_model_may_not_be_the_judge(tmp_path: Path):
    path = write_model(tmp_path / "rm", labels=1)
    with pytest.raises(ConfigError, match="is the reward model that PPO trains against"):
        check(tmp_path, reward_model=path, judge=f"reward-model:{path}")


def test_a_policy_that_is_not_there_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"nowhere/model"):
        check(tmp_path, policy="nowhere/model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "'.*policy' is BertForMaskedLM, an encoder"),
        ({"is_encoder_decoder": True}, "has an encoder. Give a decoder-only model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "a model that scores"),
    ],
)
def test_a_policy_that_cannot_write_is_refused(tmp_path: Path, changes: Any, message: str):
    table = tiny_table(tmp_path)
    config = Path(table["policy"]) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(ModelError, match=message):
        check_inputs(make_settings(table, {}))


@pytest.mark.parametrize("eos_token", ["<eos>", "<unk>"])
def test_prompts_of_unknown_words_are_warned_of(tmp_path: Path, capsys, eos_token: str):
    table = tiny_table(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = eos_token
    tokenizer.save_pretrained(table["policy"])

    def warning_about(unknown: str) -> str | None:
        rows = [{"prompt": f"{unknown} w{n} w2 w3 w4 w5 w6 w7 w8 w9"} for n in range(9)]
        prompts = write_rows(tmp_path / "p.jsonl", rows)
        check_inputs(make_settings({**table, "prompts": prompts}, {}))
        found = re.search("warning: .*", capsys.readouterr().out)
        return found and found[0]

    assert warning_about("w1") is None and warning_about("Grüße") is None
    found = warning_about("Grüße aus Köln")
    if eos_token == "<unk>":
        assert found is None
    else:
        says = r"25% of the tokens of the first 9 prompts of .* are <unk>, .* cannot read .* Name a"
        assert found is not None and re.search(says, found)


def test_repeated_prompts_are_warned_of(tmp_path: Path, capsys):
    check(tmp_path)
    assert "warning" not in capsys.readouterr().out
    rows = [{"prompt": "w1"}] * 3 + [{"prompt": "w2"}] * 4
    check(tmp_path, prompts=write_rows(tmp_path / "same.jsonl", rows))
    assert re.search("warning: only 2 of the 7 prompts of .*same.jsonl", capsys.readouterr().out)
    asked = write_rows(
        tmp_path / "asked.jsonl", [{"prompt": f"w{i}", "reference": "w1"} for i in range(2, 5)]
    )
    rows = [{"prompt": f"w{i}"} for i in range(4)]
    check(tmp_path, prompts=write_rows(tmp_path / "p.jsonl", rows), eval_prompts=asked)
    assert "warning: 2 of the 3 prompts to evaluate on" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["preferences", "prompts", "eval_prompts", "sft_data"])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, name: str):
    with pytest.raises(DataError, match=r"There is no file .*gone\.jsonl"):
        check(tmp_path, **{name: str(tmp_path / "gone.jsonl")})


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("preferences", "chosen, rejected"),
        ("preferences_test", "chosen, rejected"),
        ("prompts", "prompt"),
        ("eval_prompts", "prompt"),
        ("sft_data", "prompt, completion"),
    ],
)
def test_a_missing_column_is_refused_and_those_there_named(tmp_path: Path, name: str, missing: str):
    path = write_rows(tmp_path / "other.jsonl", [{"label": "w1", "other": "w2"}])
    message = rf"'{name}': .*no column {missing}.*the columns are label, other"
    with pytest.raises(DataError, match=message):
        check(tmp_path, **{name: path})


@pytest.mark.parametrize("name", ["output_dir", "summary_json"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, name: str):
    # A file where a folder is due stops root too, whom permissions do not.
    (tmp_path / "taken").write_text("")
    place = tmp_path / "taken" / "below"
    with pytest.raises(ConfigError, match=rf"{name}: nothing can be written into .*taken"):
        check(tmp_path, **{name: str(place / "summary.json" if name == "summary_json" else place)})


def test_a_device_gets_the_summary_although_its_folder_takes_no_file(tmp_path: Path):
    with open("/dev/null", "w") as device:
        check_outputs(str(tmp_path), f"/proc/self/fd/{device.fileno()}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_link_to_a_file_without_permission_is_refused(tmp_path: Path):
    (tmp_path / "locked.json").touch(mode=0o400)
    (tmp_path / "summary.json").symlink_to("locked.json")
    with pytest.raises(ConfigError, match=r"summary_json=.* is read-only"):
        check_outputs(str(tmp_path), str(tmp_path / "summary.json"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="output_dir: nothing can be written"):
        check(tmp_path, output_dir=str(tmp_path / "locked"))


@pytest.mark.parametrize("name", ["", "team/policy", "policy:1", "anna's policy", "a\\"])
def test_a_name_that_the_registry_would_not_take_is_refused(name: str):
    with pytest.raises(ConfigError, match="registered_model="):
        check_registry(name)


def test_every_refusal_can_be_caught_at_once():
    assert all(issubclass(kind, PPOError) for kind in (ConfigError, DataError, ModelError))


def test_votes_of_people_are_pairs_that_trained_no_reward_model(tmp_path: Path):
    table = tiny_table(tmp_path)
    trained = json.loads(Path(table["preferences"]).read_text().splitlines()[0])
    votes = [
        {"prompt": "w1", "first": "w2", "second": "w3", "label": "second"},
        {"prompt": "w4", "first": "w5", "second": "w6", "label": "tie"},
        {"prompt": "w7", "first": "w8", "second": "w9", "label": ""},
        # A pair of the training, in the other order.
        {
            "prompt": trained["prompt"],
            "first": trained["rejected"],
            "second": trained["chosen"],
            "label": "first",
        },
    ]
    file = write_rows(tmp_path / "votes.jsonl", votes)
    labels = {"human_labels": file}
    (found,) = RunData(make_settings(table | {"evaluation": labels}, {})).voted_pairs()
    assert (found.prompt, found.chosen, found.rejected) == ("w1", "w3", "w2")
    assert RunData(make_settings(table, {})).voted_pairs() == []
    long = {
        "human_labels": write_rows(tmp_path / "long.jsonl", [votes[0] | {"second": "w3 " * 99}])
    }
    with pytest.raises(DataError, match=r"^'human_labels': .*Row 0 has .* tokens"):
        RunData(make_settings(table | {"evaluation": long, "overlong": "error"}, {})).voted_pairs()
    # Held-out pairs of samples count if people labeled them, and no pair of the training does.
    rows = [{"prompt": f"w{n}", "chosen": "w1", "rejected": "w2"} for n in range(40)]
    folder = tmp_path / "fresh"
    folder.mkdir()
    write_rows(folder / "pairs.jsonl", rows)
    by_people = make_settings(table | {"fresh_pairs": {"labels": file}}, {})
    held = RunData(by_people).voted_pairs(str(folder))
    assert [pair.prompt for pair in held] == [f"w{n}" for n in range(36, 40)]
    by_judge = {"count": 40, "labeller": "python:l.py:f"}
    assert (
        RunData(make_settings(table | {"fresh_pairs": by_judge}, {})).voted_pairs(str(folder)) == []
    )


def test_held_out_pairs_of_samples_fit_into_every_reward_model(tmp_path: Path):
    table = tiny_table(tmp_path) | {"overlong": "drop", "max_left_out": 0.5}
    table |= {"preferences_test": "", "held_out_share": 0.5}
    table["reward_model"] = write_model(tmp_path / "short", labels=1)
    config = tmp_path / "short" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 16}))
    rows = [{"prompt": "w1", "chosen": "w2", "rejected": "w3 " * n} for n in (1, 1, 1, 20, 500)]
    write_rows(tmp_path / "pairs.jsonl", [rows[0]] * 4 + rows[1:])
    data = RunData(make_settings(table, {}))
    assert len(data.fresh_pairs(str(tmp_path))[1]) == 4
    fitting = data.fitting_held_out_pairs(str(tmp_path))
    assert [row["rejected"].split() for row in fitting] == [["w3"]] * 2
