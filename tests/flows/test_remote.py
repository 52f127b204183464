"""The flow on machines that share nothing but S3 and MLflow: Step Functions, executed by moto."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.pipeline_inputs import as_toml, tiny_table
from tests.helpers.servers import BUCKET, MlflowServer, mlflow_server
from tests.helpers.state_machine import StateMachines, state_machines

FLOW = ROOT / "flows" / "rlhf.py"

INPUTS = "policy", "sft_data", "preferences", "prompts", "eval_prompts"


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StateMachines, MlflowServer]]:
    """AWS and an MLflow server, whose artifacts are in S3."""
    jobs: dict[str, str] = {}
    with state_machines(jobs) as machines:
        folder = tmp_path_factory.mktemp("mlflow")
        root = f"s3://{BUCKET}/mlflow"
        with mlflow_server(folder, root, machines.variables) as server:
            machines.jobs.variables["MLFLOW_TRACKING_URI"] = server.url
            machines.jobs.variables["MLFLOW_S3_ENDPOINT_URL"] = machines.variables[
                "MLFLOW_S3_ENDPOINT_URL"
            ]
            yield machines, server


def upload(machines: StateMachines, table: dict[str, Any]) -> dict[str, Any]:
    """Store the inputs of a table in S3, and return the table with their addresses."""
    s3 = machines.client("s3")

    def stored(path: Path) -> str:
        for file in [path] if path.is_file() else path.iterdir():
            s3.upload_file(str(file), BUCKET, f"data/{file.relative_to(path.parent)}")
        return f"s3://{BUCKET}/data/{path.name}"

    kind, file, function = table["judge"].split(":")
    judge = f"{kind}:{stored(Path(file))}:{function}"
    return table | {name: stored(Path(table[name])) for name in INPUTS} | {"judge": judge}


def test_a_run_on_data_in_s3(cloud: tuple[StateMachines, MlflowServer], tmp_path: Path):
    machines, _ = cloud
    table = upload(machines, tiny_table(tmp_path)) | {"output_dir": "outputs"}
    table["accept_reward_model"] = True
    (tmp_path / "settings.toml").write_text(as_toml(table))
    ended = machines.execute(FLOW, "--config", "settings", tmp_path / "settings.toml")
    for job in ended.jobs:
        print(f"===== {job.step} {job.attempt}: {job.exit_code}, {job.seconds:.1f} s")
        print(job.log[-6000:])
    if ended.status != "SUCCEEDED":
        pytest.fail(ended.status)
