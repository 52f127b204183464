"""Guards of a user are tried by the first step, before anything is trained."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.inputs.run_data import RunData
from pipeline.preflight.check_inputs import check_inputs
from pipeline.preflight.guard_trial import try_guards
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from ppo_core.errors import ConfigError, PPOError
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.runs.forked_python import run_python

GUARDS = """
def short(prompts, responses):
    return [len(response.split()) < 5 for response in responses]

def words(prompts, responses):
    return [len(response.split()) for response in responses]

def first_word(prompts, responses):
    return [1.0 if response.split()[0] else 0.0 for response in responses]

def hangs(prompts, responses):
    import time
    time.sleep(60)
"""


def with_guards(folder: Path, *names: str, **changes: Any) -> Settings:
    table = tiny_table(folder)
    (folder / "guards.py").write_text(GUARDS)
    functions = {name: f"python:{folder / 'guards.py'}:{name}" for name in names}
    promotion = {"guards": {"functions": functions}}
    return make_settings({**table, "promotion": promotion, **changes}, {})


def test_each_guard_is_tried_on_two_rows(tmp_path: Path, capsys):
    settings = with_guards(tmp_path, "short")
    check_inputs(settings)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "guards" in line]
    assert line == (
        f"promotion.guards.functions.short=python:{tmp_path / 'guards.py'}:short: "
        "0 for an answer to another prompt, 1 for an empty one"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("words", r"The guard words returned 5, but the score of a response must be in \[0, 1\]"),
        ("first_word", r"The guard first_word raised IndexError in .*guards\.py:\d+"),
        ("gone", r"promotion\.guards\.functions\.gone=.* has no function 'gone'"),
    ],
)
def test_a_guard_that_would_fail_is_named_before_the_training(tmp_path, name: str, message: str):
    with pytest.raises(PPOError, match=message):
        check_inputs(with_guards(tmp_path, "short", name))


def test_a_guard_that_hangs_ends_the_step(tmp_path: Path):
    script = tmp_path / "hang.py"
    script.write_text(
        "from pathlib import Path\n"
        "from pipeline.inputs.run_data import RunData\n"
        "from pipeline.preflight.guard_trial import try_guards\n"
        "from tests.flows.stages.test_guard_trial import with_guards\n"
        "try_guards(RunData(with_guards(Path('.'), 'hangs', stall_minutes=0.02)))\n"
    )
    ran = run_python(script, folder=tmp_path)
    assert ran.returncode == 1
    assert "made no progress for 0.02 minutes" in ran.stderr, ran.stderr


def test_without_functions_nothing_is_tried(tmp_path: Path, capsys):
    try_guards(RunData(with_guards(tmp_path)))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("guards", "message"),
    [
        ({"margn": 0.1}, r"Unknown setting promotion\.guards\.margn\. Did you mean"),
        ({"margin": "0.1"}, r"promotion\.guards\.margin='0\.1' must be a number"),
        ({"functions": ["python:a.py:f"]}, r"promotion\.guards\.functions="),
        ({"margins": {"stops": "a"}}, r"promotion\.guards\.margins\.stops='a'"),
        ({"off": "language"}, r"promotion\.guards\.off='language' must be a list"),
        ({"off": ["langage"]}, r"\[promotion\.guards\] off names 'langage'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_section(tmp_path, guards: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        make_settings({**tiny_table(tmp_path), "promotion": {"guards": guards}}, {})
    with pytest.raises(ConfigError, match=r"promotion\.guards=0\.1 must be a section"):
        make_settings({**tiny_table(tmp_path), "promotion": {"guards": 0.1}}, {})


def test_a_setting_of_a_guard_is_given_on_the_command_line(tmp_path: Path):
    settings = make_settings(
        tiny_table(tmp_path),
        {},
        ["promotion.guards.functions.own=python:a.py:f", "promotion.guards.margins.own=0.02"],
    )
    assert settings.promotion.guards.functions == {"own": "python:a.py:f"}
    assert settings.promotion.guards.margin_of("own") == 0.02
