"""Real runs that fail, with secrets in every place: no output and no file holds one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from tests.helpers.inputs.pipeline_inputs import JUDGE, tiny_table
from tests.helpers.runs.canaries import (
    CANARY,
    TRACKING_URI,
    VARIABLES,
    Ran,
    copy_project,
    run_with_canaries,
)
from tests.helpers.servers.fault_server import fault_server, refuse
from tests.helpers.servers.redirects import redirecting_server
from tests.helpers.slow_cases import slow

pytestmark = pytest.mark.timeout(300)

ADDRESS = f"https://me:{CANARY}address@127.0.0.1:1/x"
SECRET = VARIABLES["SERVICE_PASSWORD"]
SECRET_IN_JUDGE = 'import os\nsecret = os.environ["SERVICE_PASSWORD"]\nprint(secret)\n'
RUN = ("flows/rlhf.py", "--config", "settings", "SETTINGS", "run")


@dataclass(frozen=True)
class Case:
    """A run that fails."""

    says: str
    """Part of its output."""

    command: tuple[str, ...] = RUN
    """SETTINGS and MODEL stand for paths of the inputs."""

    environment: Mapping[str, str] = field(default_factory=dict)
    table: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from those of a run that succeeds."""

    judge: str = JUDGE


FAST = {
    "--policy": Case("--policy holds an address", (*RUN, "--policy", ADDRESS)),
    "MLflow away": Case("gives no answer", environment={"MLFLOW_TRACKING_URI": TRACKING_URI}),
}

SLOW = {
    "--judge": Case("--judge holds", (*RUN, f"--judge=openai:{SECRET}")),
    "--preferences": Case("--preferences holds", (*RUN, "--preferences", ADDRESS)),
    "--prompts": Case("--prompts holds", (*RUN, "--prompts", f"https://h/x?token={CANARY}token")),
    "--eval-prompts": Case(
        "--eval-prompts holds", (*RUN, "--eval-prompts", f"x/hf_{CANARY}0123456789")
    ),
    "--reward-model": Case("--reward-model holds", (*RUN, "--reward-model", f"x/{SECRET}")),
    "--tag": Case("--tag holds", (*RUN, "--tag", f"from:{ADDRESS}")),
    "--config-value": Case(
        "--config-value holds",
        ("flows/rlhf.py", "--config-value", "settings", f'policy = "{ADDRESS}"', "run"),
    ),
    "METAFLOW_RUN_POLICY": Case(
        "METAFLOW_RUN_POLICY holds", environment={"METAFLOW_RUN_POLICY": ADDRESS}
    ),
    "judging.base_url": Case("judging.base_url holds", table={"judging": {"base_url": ADDRESS}}),
    "ppo.vllm_server_base_url": Case(
        "ppo.vllm_server_base_url holds", table={"ppo": {"vllm_server_base_url": ADDRESS}}
    ),
    "ppo.hub_token": Case("ppo.hub_token holds", table={"ppo": {"hub_token": f"{CANARY}hub"}}),
    "policy in the file": Case("policy holds", table={"policy": f"models/{SECRET}"}),
    "sft_data in the file": Case("sft_data holds", table={"sft_data": ADDRESS}),
    "judging.api_key": Case(
        "judging.api_key holds", table={"judging": {"api_key": f"{CANARY}unknown"}}
    ),
    "database away": Case(
        "MLflow",
        environment={"MLFLOW_TRACKING_URI": f"postgresql://me:{CANARY}pg@127.0.0.1:1/x"},
    ),
    "judge's address": Case(
        "contains a user name, a password or a query",
        environment={"OPENAI_BASE_URL": f"http://me:{CANARY}judge@127.0.0.1:1/v1"},
        table={"judge": "openai:model"},
    ),
    "judge repeats the key": Case(
        "status 401: wrong key (hidden)", table={"judge": "openai:model"}
    ),
    "judge redirects": Case("status 307", table={"judge": "openai:model"}),
    "judge cannot be imported": Case(
        "cannot be imported: (hidden)", judge=f"{SECRET_IN_JUDGE}raise ImportError(secret)"
    ),
    "judge fails when imported": Case(
        "raised RuntimeError in", judge=f"{SECRET_IN_JUDGE}raise RuntimeError(secret)"
    ),
    "judge fails when asked": Case(
        "(hidden)",
        judge=f"{SECRET_IN_JUDGE}def judge(prompts, pairs):\n    raise RuntimeError(secret)",
    ),
    "judge says the secret": Case(
        "(hidden)", judge=f"{SECRET_IN_JUDGE}def judge(prompts, pairs):\n    return [secret]"
    ),
    "training's flag": Case(
        "ppo_core: model_name_or_path holds",
        ("-m", "ppo_core", "--model_name_or_path", ADDRESS, "--output_dir", "out"),
    ),
    "training's wrong flag": Case(
        "ppo_core: wandb_api_key holds", ("-m", "ppo_core", "--wandb_api_key", f"{CANARY}wandb")
    ),
    "training's number": Case(
        "ppo_core: argument", ("-m", "ppo_core", "--learning_rate", SECRET, "--output_dir", "out")
    ),
    "supervised": Case(
        "ppo_core.supervised: ",
        (
            *("-m", "ppo_core.supervised", "sft", "--output_dir", "out"),
            *("--model_name_or_path", "MODEL", "--dataset_name", ADDRESS),
        ),
    ),
    "win_rate.py": Case(
        "win_rate: ",
        ("flows/win_rate.py", "--model", "models:/x/1", "--judge", "rule"),
        {"MLFLOW_TRACKING_URI": TRACKING_URI},
    ),
    "registry.py": Case(
        "registry: The MLflow registry",
        ("flows/registry.py", "show", "policy"),
        {"MLFLOW_TRACKING_URI": TRACKING_URI},
    ),
    "registry.py --reason": Case(
        "registry: reason holds",
        ("flows/registry.py", "rollback", "policy", "--reason", f"leaked {SECRET}"),
    ),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(tmp_path_factory.mktemp("project"))


def run_case(case: Case, project: Path, folder: Path, base_url: str = "") -> Ran:
    inputs = folder / "inputs"
    inputs.mkdir()
    table = tiny_table(inputs)
    table |= {"output_dir": "outputs", "accept_reward_model": True}
    for name, value in case.table.items():
        table[name] = {**table.get(name, {}), **value} if isinstance(value, dict) else value
    if base_url:
        table["judging"] = {"base_url": base_url, "retries": 0}
    (inputs / "judge.py").write_text(case.judge)
    settings = inputs / "settings.toml"
    settings.write_text(tomli_w.dumps(table))
    paths = {"SETTINGS": str(settings), "MODEL": str(inputs / "policy")}
    command = [paths.get(word, word) for word in case.command]
    return run_with_canaries(project, folder / "work", command, case.environment)


def check_clean(ran: Ran, says: str) -> None:
    assert ran.leaks() == []
    assert ran.code == 1, ran.log
    assert says in ran.log, ran.log


@pytest.mark.parametrize("name", ["--policy", *slow("MLflow away")])
def test_a_failing_run_leaves_no_secret(name: str, project: Path, tmp_path: Path):
    ran = run_case(FAST[name], project, tmp_path)
    check_clean(ran, FAST[name].says)
    if name == "MLflow away":
        # The search reads what Metaflow stores: the remote is there, without its token.
        stored = [path.read_text() for path in ran.folder.rglob("*_artifact*git-info*")]
        stored += [path.read_text() for path in ran.folder.rglob("*git-info*")]
        assert json.loads(json.loads(stored[0])["value"])["repo_url"] == "https://host/project.git"


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_failing_run_of_any_kind_leaves_no_secret(name: str, project: Path, tmp_path: Path):
    case = SLOW[name]
    if name == "judge repeats the key":
        key = VARIABLES["OPENAI_API_KEY"]
        with fault_server([refuse(401, f"wrong key {key}")]) as server:
            check_clean(run_case(case, project, tmp_path, server.url), case.says)
    elif name == "judge redirects":
        with redirecting_server(307) as server:
            check_clean(run_case(case, project, tmp_path, f"{server.url}/v1"), case.says)
            assert server.arrived == []
    else:
        check_clean(run_case(case, project, tmp_path), case.says)
