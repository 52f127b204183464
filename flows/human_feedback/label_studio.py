"""Write pairs of answers as tasks of Label Studio, and read the labels of its export."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from human_feedback.labeling import label_row, sides_of
from pipeline.inputs.human_labels_to_pairs import Vote
from ppo_core.data.chat_template import Messages
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.errors import DataError
from ppo_core.io.atomic_files import explained_writes, write_atomically
from ppo_core.io.text_files import read_json_file
from ppo_core.io.validation import read_record

CONTROL = "better"
"""Name of the tag `Choices` in INTERFACE."""

INTERFACE = f"""<View>
  <Text name="prompt" value="$prompt"/>
  <View style="display: flex">
    <View style="flex: 50%"><Text name="left" value="$left"/></View>
    <View style="flex: 50%"><Text name="right" value="$right"/></View>
  </View>
  <Choices name="{CONTROL}" toName="prompt" choice="single-radio" showInline="true">
    <Choice value="left"/>
    <Choice value="right"/>
    <Choice value="tie"/>
  </Choices>
</View>"""
"""Labeling interface of the Label Studio project, written with the tags of
https://labelstud.io/tags/choices."""

ANYONE = "label-studio"
"""Id of the annotator for `sides_of`, because nobody knows yet who will label a task."""


@dataclass(frozen=True)
class _Value:
    choices: tuple[Literal["left", "right", "tie"]]


@dataclass(frozen=True)
class _Result:
    from_name: str = ""
    value: Any = None


@dataclass(frozen=True)
class _Annotation:
    result: list[_Result]
    completed_by: Any = None
    """Id of the person, or an object that contains the id."""

    was_cancelled: bool = False


@dataclass(frozen=True)
class _Pair:
    prompt: str | Messages
    first: str
    second: str


@dataclass(frozen=True)
class _Data:
    left: str
    right: str
    pair: _Pair


@dataclass(frozen=True)
class _Task:
    data: _Data
    annotations: list[_Annotation]


def write_tasks(pairs: Sequence[Vote], path: Path) -> None:
    """Write one task for each pair, for the import into a Label Studio project.

    About half of the tasks show the second answer on the left.

    Raises:
        TrainingError: the file cannot be written.
    """
    tasks = []
    for pair in pairs:
        left, right = sides_of(pair, ANYONE)
        shown = {"prompt": shown_prompt(pair.prompt), "left": left, "right": right}
        kept = {"prompt": pair.prompt, "first": pair.first, "second": pair.second}
        tasks.append({"data": {**shown, "pair": kept}})
    with explained_writes(path):
        write_atomically(path, json.dumps(tasks, ensure_ascii=False, indent=1))


def labels_of_export(path: Path) -> list[dict[str, Any]]:
    """Return one row of votes for each label in a file that Label Studio exported as `JSON`.

    Skipped tasks, and results that do not come from the tag CONTROL, are left out.

    Raises:
        DataError: the file is not such an export, or has no label.
    """
    content = read_json_file(path, DataError)
    try:
        tasks = [read_record(task, _Task) for task in content]
        rows = [row for task in tasks for row in _rows_of(task)]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"'{path}' is not an export of a project with tasks from `feedback.py "
            f"to-label-studio`: {error}. Export the project in the format JSON, which keeps the "
            "tasks' data."
        ) from error
    if not rows:
        raise DataError(f"{path} has {len(tasks)} tasks, and none has a label. Label some first.")
    return rows


def _rows_of(task: _Task) -> Iterator[dict[str, Any]]:
    pair = Vote(**vars(task.data.pair), label="")
    if {task.data.left, task.data.right} != {pair.first, pair.second}:
        raise ValueError(
            "a task shows answers that differ from the answers of its pair; the pair's first "
            f"answer is {pair.first!r:.60}"
        )
    for annotation in task.annotations:
        if annotation.was_cancelled:
            continue
        for result in annotation.result:
            if result.from_name == CONTROL:
                (choice,) = read_record(result.value, _Value).choices
                yield label_row(pair, choice, _person(annotation), left=task.data.left)


def _person(annotation: _Annotation) -> str | None:
    """Return the email address or id of the annotator; None if both are unknown."""
    who = annotation.completed_by
    if isinstance(who, dict):
        who = who.get("email") or who.get("id")
    return None if who is None else str(who)
