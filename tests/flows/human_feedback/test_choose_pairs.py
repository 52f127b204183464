"""Pairs to label: chosen from samples of tiny policies, disputed, and taken to Label Studio."""

import json
import math
import tomllib
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import feedback
from human_feedback.label_studio import ANYONE
from human_feedback.labeling import sides_of
from human_feedback.read_opinions import read_pairs
from pipeline.demo.task import find_demo_task
from pipeline.inputs.human_labels_to_pairs import votes_of
from ppo_core.models.loading import load_reward_model
from tests.flows.stages.test_fetch_inputs import upload
from tests.helpers.inputs.pipeline_inputs import tiny_table, write_rows
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with two policies, a reward model, and one with two members."""
    folder = tmp_path_factory.mktemp("inputs")
    table = tiny_table(folder) | {"registered_model": "tiny-policy", "output_dir": str(folder)}
    (folder / "settings.toml").write_text(tomli_w.dumps(table))
    for number in (1, 2):
        for name, model in (
            (f"policy-{number}", make_policy(seed=number)),
            (f"members/member-{number}", make_classifier(seed=number)),
        ):
            model.save_pretrained(folder / name)
            make_tokenizer().save_pretrained(folder / name)
    write_rows(folder / "others.jsonl", [{"prompt": f"w{n} w{n + 1}"} for n in range(12)])
    return folder


def choose(folder: Path, inputs: Path, *more: str, policies: int = 1) -> int:
    named = [
        word for n in range(1, policies + 1) for word in ("--policy", str(inputs / f"policy-{n}"))
    ]
    output = str(folder / "to-label.jsonl")
    return feedback.main(
        ["choose", str(inputs), *named, "--labels", "5", "--output", output, *more]
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_members_of_a_reward_model_choose_the_pairs_they_differ_on(
    inputs: Path, tmp_path: Path, capsys
):
    assert choose(tmp_path, inputs, "--reward-model", str(inputs / "members"), policies=2) == 0
    output = tmp_path / "to-label.jsonl"
    rows = read(output)
    assert len(rows) == 5 and {tuple(row) for row in rows} == {
        ("prompt", "first", "second", "label")
    }
    told = capsys.readouterr().out
    assert "to-label.jsonl has 5 pairs on which the reward models differ most" in told
    assert f"python flows/feedback.py label {output}" in told
    deviations = [deviation(row, inputs) for row in rows]
    assert deviations == sorted(deviations, reverse=True)
    assert f"{deviations[0]:.2f} to {deviations[-1]:.2f}" in told
    # Pairs at random of the same samples are less uncertain.
    assert choose(tmp_path, inputs, "--output", str(tmp_path / "random.jsonl"), policies=2) == 0
    drawn = [deviation(row, inputs) for row in read(tmp_path / "random.jsonl")]
    assert sum(deviations) > sum(drawn)


def deviation(row: dict[str, Any], inputs: Path) -> float:
    """Standard deviation of P(first is better) over the two members."""
    texts = [row["prompt"]] * 2, [row["first"], row["second"]]
    found = []
    for member in load_reward_model(inputs / "members").members:
        first, second = member.score_texts(*texts).tolist()
        found.append(1 / (1 + math.exp(second - first)))
    return abs(found[0] - found[1]) / 2


def test_the_same_seed_chooses_the_same_pairs(inputs: Path, tmp_path: Path):
    again = str(tmp_path / "again.jsonl")
    assert choose(tmp_path, inputs) == choose(tmp_path, inputs, "--output", again) == 0
    assert (tmp_path / "to-label.jsonl").read_bytes() == Path(again).read_bytes()


def test_two_policies_that_are_one_give_other_samples(inputs: Path, tmp_path: Path):
    policy = str(inputs / "policy-1")
    assert choose(tmp_path, inputs, "--policy", policy, "--samples", "1") == 0
    assert len(read(tmp_path / "to-label.jsonl")) == 5


def test_other_prompts_can_be_named(inputs: Path, tmp_path: Path, capsys):
    more = ("--prompts", str(inputs / "others.jsonl"), "--labels", "20")
    assert choose(tmp_path, inputs, *more) == 0
    rows = read(tmp_path / "to-label.jsonl")
    assert {row["prompt"] for row in rows} <= {f"w{n} w{n + 1}" for n in range(12)}
    told = capsys.readouterr().out
    assert f"has {len(rows)} pairs " in told and "20 pairs were asked for, but" in told


@pytest.mark.parametrize("count", [1, 12])
def test_every_named_prompt_is_used(count: int, inputs: Path, tmp_path: Path):
    """Also if the run holds out a part of its own prompts."""
    table = tomllib.loads((inputs / "settings.toml").read_text())
    del table["eval_prompts"]
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(table))
    prompts = {f"w{n} w{n + 1}" for n in range(count)}
    named = write_rows(tmp_path / "named.jsonl", [{"prompt": one} for one in prompts])
    more = ("--policy", str(inputs / "policy-1"), "--prompts", named, "--labels", "12")
    assert choose(tmp_path, tmp_path, *more, policies=0) == 0
    assert {row["prompt"] for row in read(tmp_path / "to-label.jsonl")} == prompts


def test_prompts_are_answered_until_there_are_enough_pairs(inputs: Path, tmp_path: Path, capsys):
    alike = [" ".join(words) for words in islice(permutations(["w1", "w2", "w3", "w4", "w5"]), 30)]
    unlike = [f"w{n} w{n + 1}" for n in range(12, 16)]
    named = write_rows(tmp_path / "named.jsonl", [{"prompt": one} for one in alike + unlike])
    assert choose(tmp_path, inputs, "--prompts", named) == 0
    asked = {row["prompt"] for row in read(tmp_path / "to-label.jsonl")}
    assert asked > {*unlike} and len(asked) == 5
    assert "5 pairs were asked for" not in capsys.readouterr().out


def test_labels_are_not_overwritten(inputs: Path, tmp_path: Path, capsys):
    (tmp_path / "to-label.jsonl").write_text("labels of people")
    assert choose(tmp_path, inputs) == 1
    assert "exists. It would be replaced" in capsys.readouterr().err
    assert (tmp_path / "to-label.jsonl").read_text() == "labels of people"


def test_without_a_reward_model_pairs_are_random(inputs: Path, tmp_path: Path, capsys):
    assert choose(tmp_path, inputs) == 0
    rows = read(tmp_path / "to-label.jsonl")
    assert len({row["prompt"] for row in rows}) == 5
    assert all(row["first"] != row["second"] for row in rows)
    assert "has 5 pairs drawn at random" in capsys.readouterr().out


def test_a_run_on_the_built_in_task_has_the_prompts_of_the_task(tmp_path: Path):
    table = {"task": "tldr", "output_dir": str(tmp_path), "ppo": {"response_length": 4}}
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(table))
    policy = find_demo_task(tmp_path / "cache", seed=1) / "base"
    assert choose(tmp_path, tmp_path, "--policy", str(policy), policies=0) == 0
    rows = read(tmp_path / "to-label.jsonl")
    assert len(rows) == 5 and all(row["prompt"].endswith("tl;dr :") for row in rows)


def test_inputs_of_the_run_may_be_addresses(inputs: Path, tmp_path: Path, store: str):
    """Both commands fetch them, as the run did."""
    table = tiny_table(tmp_path) | {"registered_model": "tiny-policy", "output_dir": str(tmp_path)}
    for name in ("policy", "prompts"):
        table[name] = upload(Path(table[name]), f"{store}/{Path(table[name]).name}")
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(table))
    policy = str(inputs / "policy-1")
    assert choose(tmp_path, tmp_path, "--policy", policy, policies=0) == 0
    asked = {row["prompt"] for row in read(tmp_path / "prompts.jsonl")}
    assert {row["prompt"] for row in read(tmp_path / "to-label.jsonl")} <= asked
    output = ("--output", str(tmp_path / "disputed.jsonl"))
    rows = [judgement("w1", "w2", "w3", outcome) for outcome in ("first", "second")]
    assert disputed(tmp_path, rows, inputs / "members" / "member-1", *output) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--reward-model", "members/member-1"), "has only one member"),
        (("--reward-model", "membres"), "membres' is not a folder"),
        (("--samples", "1"), "One policy with samples=1 gives one answer"),
        (("--seed", "-1"), "seed=-1"),
        (("--prompts", "nothing.jsonl"), "nothing.jsonl"),
    ],
)
def test_what_gives_no_pairs_is_refused(
    changes: tuple[str, str], message: str, inputs: Path, tmp_path: Path, capsys
):
    name, value = changes
    value = str(inputs / value) if name == "--reward-model" else value
    assert choose(tmp_path, inputs, name, value) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "to-label.jsonl").exists()


def judgement(prompt: str, first: str, second: str, outcome: str, contest: str = "ppo_vs_sft"):
    verdict = {"winner": outcome, "probability": None, "reason": ""}
    names = ("contest", "prompt", "candidate", "opponent", "outcome", "straight", "swapped")
    return dict(
        zip(names, (contest, prompt, first, second, outcome, verdict, verdict), strict=True)
    )


def disputed(
    run: Path,
    rows: list[dict[str, Any]],
    model: Path,
    *more: str,
    samples: list[dict[str, Any]] | None = None,
) -> int:
    """Run `disputed` on a run that has these verdicts, and by default a sample for each verdict."""
    (run / "evaluation").mkdir(exist_ok=True)
    write_rows(run / "evaluation" / "judgements.jsonl", rows)
    samples = [{"prompt": row["prompt"]} for row in rows] if samples is None else samples
    write_rows(run / "evaluation" / "samples.jsonl", samples)
    return feedback.main(
        ["disputed", str(run), "--reward-model", str(model), "--labels", "50", *more]
    )


def test_pairs_that_judge_and_reward_model_order_differently(inputs: Path, tmp_path: Path, capsys):
    model = inputs / "members" / "member-1"
    pairs = [(f"w{n}", f"w{n + 1} w{n + 2}", f"w{n + 3}") for n in range(8)]
    scorer = load_reward_model(model)
    margins = {}
    for prompt, first, second in pairs:
        scores = scorer.score_texts([prompt] * 2, [first, second])
        margins[prompt] = float(scores[0] - scores[1])
    outcomes = ["first", "second", "tie", "invalid"] * 2
    rows = [judgement(*pair, outcome) for pair, outcome in zip(pairs, outcomes, strict=True)]
    expected = [
        row["prompt"]
        for row in rows
        if row["outcome"] in ("first", "second")
        and (margins[row["prompt"]] > 0) != (row["outcome"] == "first")
    ]
    assert 0 < len(expected) < 4
    # Neither of these is about PPO's answers.
    rows += [judgement("w20", "w1", "w2", outcome, "sft_vs_reference") for outcome in outcomes[:2]]
    output = ("--output", str(tmp_path / "disputed.jsonl"))
    assert disputed(inputs, rows, model, *output) == 0
    found = [row["prompt"] for row in read(tmp_path / "disputed.jsonl")]
    assert found == sorted(expected, key=lambda prompt: -abs(margins[prompt]))
    told = capsys.readouterr().out
    assert f"has {len(expected)} pairs that judge" in told
    assert "or judge and reward model order their answers alike" in told


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "completion": "b"}], "is damaged"),
        (
            [judgement("a", "b", "c", "tie")],
            "the judge named no winner in the pairs",
        ),
        ([judgement("a", "b", "c", "first") | {"candidate": None}], "is damaged"),
    ],
)
def test_verdicts_that_decide_nothing_are_refused(rows, message, inputs: Path, tmp_path, capsys):
    output = ("--output", str(tmp_path / "disputed.jsonl"))
    assert disputed(inputs, rows, inputs / "members" / "member-1", *output) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("samples", [[], [{"prompt": "w9"}], [{"ppo": "w1"}]])
def test_samples_without_a_judged_prompt_are_refused(samples, inputs: Path, tmp_path, capsys):
    rows = [judgement("w1", "w2", "w3", "first")]
    output = ("--output", str(tmp_path / "disputed.jsonl"))
    model = inputs / "members" / "member-1"
    assert disputed(inputs, rows, model, *output, samples=samples) == 1
    assert "samples.jsonl' lacks a prompt of judgements.jsonl, 'w1'" in capsys.readouterr().err


PAIRS = [
    {"prompt": [{"role": "user", "content": f"p{n}"}], "first": f"good <b>{n}</b>"}
    | {"second": f"bad {n}", "label": ""}
    for n in range(6)
]


def annotated(task: dict[str, Any], choice: str, who: Any = 3, **more: Any) -> dict[str, Any]:
    result = {"from_name": "better", "to_name": "prompt", "type": "choices", "id": "x"}
    result["value"] = {"choices": [choice]}
    return {**task, "id": 1, "annotations": [{"completed_by": who, "result": [result], **more}]}


def changed(task: dict[str, Any]) -> dict[str, Any]:
    return {**task, "data": {**task["data"], "left": "another answer"}}


def export_of(tmp_path: Path) -> list[dict[str, Any]]:
    file = write_rows(tmp_path / "to-label.jsonl", PAIRS)
    assert feedback.main(["to-label-studio", file]) == 0
    return json.loads((tmp_path / "label-studio.json").read_text())


def test_labels_of_label_studio_come_back_to_their_pairs(tmp_path: Path, capsys):
    tasks = export_of(tmp_path)
    assert '<Choices name="better"' in capsys.readouterr().out
    lefts = [task["data"]["left"] for task in tasks]
    # Some answers are exchanged, and some are not.
    assert {left.split()[0] for left in lefts} == {"good", "bad"}
    votes = votes_of(read_pairs(str(tmp_path / "to-label.jsonl")))
    assert lefts == [sides_of(vote, ANYONE)[0] for vote in votes]
    done = [
        annotated(task, "left" if task["data"]["left"].startswith("good") else "right")
        for task in tasks[:4]
    ]
    done.append(annotated(tasks[4], "tie", {"id": 7, "email": "ann@example.org"}))
    done.append(annotated(tasks[5], "left", was_cancelled=True))
    (tmp_path / "export.json").write_text(json.dumps(done))
    assert feedback.main(["from-label-studio", str(tmp_path / "export.json")]) == 0
    rows = read(tmp_path / "labeled-in-label-studio.jsonl")
    assert [row["label"] for row in rows] == ["first"] * 4 + ["tie"]
    assert [row["annotator"] for row in rows] == ["3"] * 4 + ["ann@example.org"]
    assert [row["prompt"] for row in rows] == [pair["prompt"] for pair in PAIRS[:5]]
    assert [row["chosen"] for row in rows[:4]] == [pair["first"] for pair in PAIRS[:4]]
    # The labels are read like those of the page.
    assert len(votes_of(read_pairs(str(tmp_path / "labeled-in-label-studio.jsonl")))) == 5
    assert "has 5 labels of 2 known persons" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tasks: tasks, "is not an export"),
        (lambda tasks: [annotated(tasks[0], "both")], "choices"),
        (lambda tasks: [annotated(tasks[0], "left", was_cancelled=True)], "none has a label"),
        (lambda tasks: {"data": {}}, "is not an export"),
        (lambda tasks: 3, "is not an export"),
        (
            lambda tasks: [annotated(changed(tasks[0]), "left")],
            "shows answers that differ from the answers of its pair",
        ),
    ],
    ids=["no annotations", "another choice", "skipped", "no list", "a number", "other answers"],
)
def test_what_is_no_export_with_labels_is_refused(change, message: str, tmp_path: Path, capsys):
    content = change(export_of(tmp_path))
    (tmp_path / "export.json").write_text(json.dumps(content))
    assert feedback.main(["from-label-studio", str(tmp_path / "export.json")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "labeled-in-label-studio.jsonl").exists()
