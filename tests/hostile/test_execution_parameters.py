"""Parameters of scheduled executions that a shell would execute: they arrive as they are."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from metaflow_glue.execution_parameters import (
    ARGO,
    COMMANDS,
    MODULE,
    STEP_FUNCTIONS,
    exports,
    read_argo,
    read_step_functions,
)
from ppo_core.errors import ConfigError
from tests.helpers.aws.state_machine import StateMachines, state_machines
from tests.helpers.jobs.first_job import FirstJob, as_argo_sends, of_argo, of_step_functions
from tests.helpers.kubernetes.argo_templates import encoded, without_nulls
from tests.helpers.runs.scheduled_flow import flow_command
from tests.helpers.slow_cases import slow

TOUCH = "touch MARK"
HOSTILE = [
    "$(touch MARK)",
    "`touch MARK`",
    "; touch MARK;",
    "' ; touch MARK ; '",
    '" ; touch MARK ; "',
    "| touch MARK",
    "& touch MARK &",
    "\ntouch MARK\n",
    "$(touch${IFS}MARK)",
    "$(( $(touch MARK) ))",
    "\\$(touch MARK)",
    "'$(touch MARK)'",
    '"$(touch MARK)"',
    "$'\\x60touch MARK\\x60'",
    "<(touch MARK)",
    "> MARK",
    "é $(touch MARK) 漢",
    "{{workflow.name}}$(touch MARK)",
    "${X:=$(touch MARK)}",
    "a\\\n$(touch MARK)",
    "# \\\n`touch MARK`",
    "$PATH ${HOME} $$ !!",
    "~ * ? [a-z]",
]
"""Values of which a shell would execute or replace a part. MARK is a file that would appear."""

TEXTS = (
    "policy reward-model preferences prompts eval-prompts judge registered-model output-dir "
    "summary-json lease"
).split()
"""Parameters of the flow that take any text."""


@pytest.fixture(scope="module")
def machines() -> Iterator[StateMachines]:
    with state_machines() as machines:
        yield machines


def compiled(folder: Path, machines: StateMachines, scheduler: str) -> Any:
    made = flow_command(folder, scheduler, "create", "--only-json", variables=machines.variables)
    assert made.returncode == 0, made.stderr[-3000:]
    return without_nulls(json.loads(made.stdout))


Start = Callable[[Mapping[str, Any]], FirstJob]


@pytest.fixture(scope="module", params=["step-functions", *slow("argo")])
def start(
    request: pytest.FixtureRequest,
    machines: StateMachines,
    tmp_path_factory: pytest.TempPathFactory,
) -> Start:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "argo":
        template = compiled(folder, machines, "argo-workflows")
        return lambda given: of_argo(template, as_argo_sends(given))
    states = compiled(folder, machines, "step-functions")["States"]
    return lambda given: of_step_functions(states, given)


FIRSTS = range(0, len(HOSTILE), len(TEXTS))
"""Numbers of the first value of each execution."""


@pytest.mark.parametrize("first", [0, *slow(*FIRSTS[1:])])
def test_a_compiled_job_executes_nothing_of_its_parameters(
    first: int, start: Start, machines: StateMachines, tmp_path: Path
):
    mark = tmp_path / "mark"
    values = [each.replace("MARK", str(mark)) for each in HOSTILE[first : first + len(TEXTS)]]
    texts, in_list = dict(zip(TEXTS, values, strict=False)), f"$(touch${{IFS}}{mark})"
    given = texts | {"set": f"ppo.x={in_list} {in_list}"}
    stored = start(given).store(tmp_path, machines.variables)
    assert {name: stored[name.replace("-", "_")] for name in texts} == texts
    assert tuple(stored["overrides"]) == (f"ppo.x={in_list}", in_list)
    assert not mark.exists()
    assert [each.name for each in (tmp_path / "job").rglob("*MARK*")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("seed", "not a valid integer"),
        pytest.param("accept-reward-model", "not a valid boolean", marks=pytest.mark.slow),
    ],
)
def test_nor_of_a_number_or_a_flag(
    name: str, refused: str, start: Start, machines: StateMachines, tmp_path: Path
):
    mark = tmp_path / "mark"
    ran = start({name: f"$(touch {mark})"}).run(tmp_path, machines.variables)
    assert refused in ran.stdout + ran.stderr
    assert not mark.exists()


NAMES = ["x=1; touch MARK; y", "$(touch MARK)", "SCRIPT", "polcy", "policy\ntouch MARK"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_no_parameter_of_the_flow_is_refused(name: str):
    given = {"METAFLOW_PARAMETERS": json.dumps({name: "1"})}
    with pytest.raises(ConfigError, match=r"The flow has no parameter .*policy"):
        read_step_functions(["policy", "reward-model"], given)


@pytest.mark.slow
def test_a_job_with_such_a_name_ends_before_its_step(machines: StateMachines, tmp_path: Path):
    states = compiled(tmp_path, machines, "step-functions")["States"]
    mark = tmp_path / "mark"
    job = of_step_functions(states, {f"x=1; touch {mark}; y": "1", "policy": "p"})
    ran = job.run(tmp_path, machines.variables)
    assert ran.returncode != 0
    assert "The flow has no parameter 'x=1; touch" in ran.stdout + ran.stderr
    assert not mark.exists() and not (tmp_path / "stored").exists()


@pytest.mark.parametrize("given", ["[]", "null", "policy", '"{}"', "1", '{"policy": ', ""])
def test_parameters_that_are_no_object_are_refused(given: str):
    with pytest.raises(ConfigError, match="are not a JSON object"):
        read_step_functions(["policy"], {"METAFLOW_PARAMETERS": given})


def test_a_null_character_is_refused():
    with pytest.raises(ConfigError, match="'judge' has a null character"):
        exports({"judge": "a\0b"})


@pytest.mark.parametrize(
    "value", [*HOSTILE, "", "null", "12", "a b", "it's", 'q"q', "a\\b", "\x7f"]
)
def test_a_shell_reads_the_value_that_was_given(value: str, tmp_path: Path):
    through = (
        read_step_functions(["policy"], {"METAFLOW_PARAMETERS": json.dumps({"policy": value})}),
        read_argo([f"policy,t,{encoded(json.dumps(value))}"]),
    )
    for values in through:
        (tmp_path / "file").write_text(exports(values), encoding="utf-8")
        read = '. ./file && printf "%s" "$METAFLOW_INIT_POLICY"'
        ran = subprocess.run(["bash", "-c", read], cwd=tmp_path, capture_output=True, check=True)
        assert ran.stdout.decode() == value
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


RAW = {
    "my-model": "my-model",
    "1.10": "1.10",
    "1e3": "1e3",
    "12e4567": "12e4567",
    "true": "true",
    '["a"]': '["a"]',
    "{x": "{x",
    "": "",
    '"null"': "null",
}
"""Values as a person writes them in Argo's form -> what arrives."""


@pytest.mark.parametrize("text", RAW)
def test_a_value_of_argos_own_form_arrives_as_it_is(text: str):
    assert read_argo([f"policy,t,{encoded(text)}"]) == {"policy": RAW[text]}


def test_null_is_no_value_where_the_default_is_none_and_a_text_elsewhere():
    words = [f"policy,t,{encoded('null')}", f"lease,f,{encoded('null')}"]
    assert read_argo(words) == {"policy": None, "lease": "null"}


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--tag", "run"), ("--tag", "create")])
def test_no_word_of_the_command_switches_the_quoting_off(
    words: tuple[str, ...], machines: StateMachines, tmp_path: Path
):
    for scheduler in COMMANDS.values():
        command = (scheduler, "create", "--only-json", *words)
        made = flow_command(tmp_path, *command, variables=machines.variables)
        assert made.returncode == 0, made.stderr[-3000:]
        assert MODULE in made.stdout
        assert not ARGO.search(made.stdout) and not STEP_FUNCTIONS.search(made.stdout)


def test_values_that_are_no_text_arrive_as_json_and_none_is_left_out():
    given = {"seed": 3, "check": True, "accept-reward-model": False, "judge": None, "set": ["a"]}
    assert exports(given).splitlines() == [
        "export METAFLOW_INIT_SEED=3",
        "export METAFLOW_INIT_CHECK=true",
        "export METAFLOW_INIT_ACCEPT_REWARD_MODEL=false",
        "export METAFLOW_INIT_SET='[\"a\"]'",
    ]
