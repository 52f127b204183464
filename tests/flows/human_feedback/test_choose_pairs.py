"""Pairs to label: chosen from samples of tiny policies, disputed, and taken to Label Studio."""

import json
from pathlib import Path
from typing import Any

import pytest

import feedback
from human_feedback.label_studio import ANYONE
from human_feedback.labeling import sides_of
from human_feedback.read_votes import read_pairs
from pipeline.inputs.preference_pairs import votes_of
from ppo_core.models.loading import load_reward_model
from tests.helpers.inputs.pipeline_inputs import write_rows
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two policies, prompts, a reward model, and one with two members."""
    folder = tmp_path_factory.mktemp("inputs")
    for number in (1, 2):
        for name, model in (
            (f"policy-{number}", make_policy(seed=number)),
            (f"members/member-{number}", make_classifier(seed=number)),
        ):
            model.save_pretrained(folder / name)
            make_tokenizer().save_pretrained(folder / name)
    write_rows(folder / "prompts.jsonl", [{"prompt": f"w{n} w{n + 1}"} for n in range(12)])
    return folder


def choose(folder: Path, inputs: Path, *more: str, policies: int = 1) -> int:
    named = [
        word for n in range(1, policies + 1) for word in ("--policy", str(inputs / f"policy-{n}"))
    ]
    return feedback.main(
        [
            *("choose", *named, "--prompts", str(inputs / "prompts.jsonl")),
            *(
                "--response-length",
                "6",
                "--labels",
                "5",
                "--output",
                str(folder / "to-label.jsonl"),
            ),
            *("--output-dir", str(folder), *more),
        ]
    )


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_members_of_a_reward_model_choose_the_pairs_they_differ_on(
    inputs: Path, tmp_path: Path, capsys
):
    assert choose(tmp_path, inputs, "--reward-model", str(inputs / "members"), policies=2) == 0
    rows = read(tmp_path / "to-label.jsonl")
    assert len(rows) == 5 and {tuple(row) for row in rows} == {
        ("prompt", "first", "second", "label")
    }
    one, two = load_reward_model(inputs / "members").members

    def difference(row: dict[str, Any]) -> float:
        texts = [row["prompt"]] * 2, [row["first"], row["second"]]
        first, second = (m.score_texts(*texts) for m in (one, two))
        return float(abs((first[0] - first[1]) - (second[0] - second[1])))

    assert min(map(difference, rows)) > 0
    told = capsys.readouterr().out
    assert "to-label.jsonl has 5 pairs on which the members of the reward model differ" in told
    assert f"python flows/feedback.py label {tmp_path / 'to-label.jsonl'}" in told
    content = (tmp_path / "to-label.jsonl").read_bytes()
    assert choose(tmp_path, inputs, "--reward-model", str(inputs / "members"), policies=2) == 0
    assert (tmp_path / "to-label.jsonl").read_bytes() == content


def test_without_a_reward_model_pairs_are_random(inputs: Path, tmp_path: Path, capsys):
    assert choose(tmp_path, inputs) == 0
    rows = read(tmp_path / "to-label.jsonl")
    assert len({row["prompt"] for row in rows}) == 5
    assert all(row["first"] != row["second"] for row in rows)
    assert "has 5 pairs drawn at random" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--reward-model", "members/member-1"), "has one member"),
        (("--labels", "0"), "labels=0 must be at least 1"),
        (("--samples", "1"), "samples=1 of one policy is one answer"),
        (("--temperature", "0"), "temperature=0 must be above 0"),
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


def test_pairs_that_judge_and_reward_model_order_differently(inputs: Path, tmp_path: Path, capsys):
    model = inputs / "members" / "member-1"
    pairs = [(f"w{n}", f"w{n + 1} w{n + 2}", f"w{n + 3}") for n in range(8)]
    scorer = load_reward_model(model)
    margins = {}
    for prompt, first, second in pairs:
        scores = scorer.score_texts([prompt] * 2, [first, second])
        margins[prompt] = float(scores[0] - scores[1])
    rows = [
        {"prompt": prompt, "candidate": first, "opponent": second, "outcome": outcome}
        for (prompt, first, second), outcome in zip(
            pairs, ["first", "second", "tie", "invalid"] * 2, strict=True
        )
    ]
    disputed = [
        row["prompt"]
        for row in rows
        if row["outcome"] in ("first", "second")
        and (margins[row["prompt"]] > 0) != (row["outcome"] == "first")
    ]
    assert 0 < len(disputed) < 4
    file = write_rows(tmp_path / "judgements.jsonl", rows)
    assert feedback.main(["disputed", file, "--reward-model", str(model)]) == 0
    found = [row["prompt"] for row in read(tmp_path / "disputed.jsonl")]
    assert found == sorted(disputed, key=lambda prompt: -abs(margins[prompt]))
    assert f"has {len(disputed)} pairs whose better answer" in capsys.readouterr().out


def test_the_judgements_of_another_file_are_refused(inputs: Path, tmp_path: Path, capsys):
    file = write_rows(tmp_path / "other.jsonl", [{"prompt": "a", "completion": "b"}])
    model = str(inputs / "members" / "member-1")
    assert feedback.main(["disputed", file, "--reward-model", model]) == 1
    assert "judgements.jsonl has prompt, candidate, opponent and outcome" in capsys.readouterr().err


PAIRS = [
    {"prompt": f"p{n}", "first": f"good <b>{n}</b>", "second": f"bad {n}", "label": ""}
    for n in range(6)
]


def annotated(task: dict[str, Any], choice: str, who: Any = 3, **more: Any) -> dict[str, Any]:
    result = {"from_name": "better", "to_name": "prompt", "type": "choices", "id": "x"}
    result["value"] = {"choices": [choice]}
    return {**task, "id": 1, "annotations": [{"completed_by": who, "result": [result], **more}]}


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
    rows = read(tmp_path / "labeled.jsonl")
    assert [row["label"] for row in rows] == ["first"] * 4 + ["tie"]
    assert [row["annotator"] for row in rows] == ["3"] * 4 + ["ann@example.org"]
    assert [row["chosen"] for row in rows[:4]] == [pair["first"] for pair in PAIRS[:4]]
    # The labels are read like those of the page.
    assert len(votes_of(read_pairs(str(tmp_path / "labeled.jsonl")))) == 5
    assert "has 5 labels of 2 persons" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tasks: tasks, "is no export"),
        (lambda tasks: [annotated(tasks[0], "both")], "choices"),
        (lambda tasks: [annotated(tasks[0], "left", was_cancelled=True)], "none has a label"),
        (lambda tasks: {"data": {}}, "is no export"),
    ],
    ids=["no annotations", "another choice", "skipped", "no list"],
)
def test_what_is_no_export_with_labels_is_refused(change, message: str, tmp_path: Path, capsys):
    content = change(export_of(tmp_path))
    (tmp_path / "export.json").write_text(json.dumps(content))
    assert feedback.main(["from-label-studio", str(tmp_path / "export.json")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "labeled.jsonl").exists()
