"""The flow on machines that share nothing but S3 and MLflow: Step Functions, executed by moto."""

import gzip
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion

from pipeline.launch.launcher import SPOT_NOTICE
from pipeline.tracking.run_log import FIGURES, read_figures
from tests.helpers.aws.cloud import Cloud, cloud_of
from tests.helpers.aws.state_machine import Execution
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.paths import ROOT
from tests.helpers.runs.flow_runs import client_of
from tests.helpers.servers.servers import BUCKET

FLOW = ROOT / "flows" / "rlhf.py"

INPUTS = "policy", "sft_data", "preferences", "prompts", "eval_prompts"

STEPS = (
    "start load_policy load_reward_model validate_reward_model train_policy evaluate_win_rate "
    "register end"
).split()

UPDATES = 40

GZIP = b"\x1f\x8b"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass(frozen=True)
class FlowInCloud(Cloud):
    """The flow with the settings of `tiny_table`, whose inputs are in S3."""

    machine: str
    """State machine of the flow."""

    def start(self, **parameters: object) -> Execution:
        ended = self.machines.start(self.machine, parameters)
        if ended.status != "SUCCEEDED":
            pytest.fail(f"{ended.status}: {ended.jobs[-1].log[-4000:]}", pytrace=False)
        return ended

    def runs(self, execution: Execution) -> dict[str, Run]:
        """The runs in MLflow of an execution, by step."""
        experiment = self.mlflow.get_experiment_by_name("rlhf")
        flow_run = f"tags.flow_run = 'RLHF/sfn-{execution.name}'"
        found = self.mlflow.search_runs([experiment.experiment_id], flow_run)
        return {run.data.tags["step"]: run for run in found}

    def version(self, execution: Execution) -> ModelVersion:
        run = self.runs(execution)["parent"]
        (found,) = [
            one
            for one in self.mlflow.search_model_versions("name = 'rlhf-policy'")
            if one.run_id == run.info.run_id
        ]
        return found


def upload(cloud: Cloud, table: dict[str, Any]) -> dict[str, Any]:
    """Store the inputs of a table in S3, and return the table with their addresses."""
    kind, file, function = table["judge"].split(":")
    judge = f"{kind}:{cloud.upload(Path(file))}:{function}"
    stored = {name: cloud.upload(Path(table[name])) for name in INPUTS}
    return table | stored | {"judge": judge}


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowInCloud]:
    folder = tmp_path_factory.mktemp("mlflow")
    with cloud_of(folder) as made:
        ppo = {"total_episodes": 8 * UPDATES, "batch_size": 8, "response_length": 6}
        table = upload(made, tiny_table(folder))
        table |= {"output_dir": "outputs", "accept_reward_model": True}
        table["ppo"] = ppo | {"save_steps": 5}
        (folder / "settings.toml").write_text(tomli_w.dumps(table))
        machine = made.machines.create(FLOW, "--config", "settings", folder / "settings.toml")
        yield FlowInCloud(made.machines, made.server, machine)


@pytest.fixture(scope="module")
def first(cloud: FlowInCloud) -> Execution:
    return cloud.start()


def log_of(execution: Execution, step: str) -> str:
    return "".join(job.log for job in execution.jobs if job.step == step)


def curve(cloud: FlowInCloud, execution: Execution) -> list[int]:
    """The updates of PPO that MLflow has."""
    run = cloud.runs(execution)["parent"].info.run_id
    return [metric.step for metric in cloud.mlflow.get_metric_history(run, "objective/kl")]


def mlflow_text(client: MlflowClient, run: Run, artifact: str) -> str:
    return Path(client.download_artifacts(run.info.run_id, artifact)).read_text()


def test_every_step_runs_once_and_the_version_is_registered(cloud: FlowInCloud, first: Execution):
    assert [job.step for job in first.jobs] == STEPS
    # No job made the folder of another one again.
    assert not [job.step for job in first.jobs if job.revisited]
    version = cloud.version(first)
    assert version.tags["flow_run"] == f"RLHF/sfn-{first.name}"
    tags = cloud.runs(first)["parent"].data.tags
    assert re.fullmatch(r"[0-9a-f]{40}", tags["git_commit"])
    assert tags["git_changes"] in ("yes", "no")


def test_mlflow_has_all_curves_and_reports(cloud: FlowInCloud, first: Execution):
    runs = cloud.runs(first)
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert curve(cloud, first) == [*range(1, UPDATES + 1)]
    artifacts = {one.path for one in cloud.mlflow.list_artifacts(runs["parent"].info.run_id)}
    assert {"settings.toml", "packages.txt", "summary.json", "index.html", FIGURES} <= artifacts
    text = mlflow_text(cloud.mlflow, runs["parent"], "index.html")
    assert text.count('<polyline class="line"') > 13
    assert "<h3>Prompt 8</h3>" in text
    assert "Not shown" not in text
    assert not [job for job in first.jobs if str(job.folder) in text]
    # The step of the evaluation has fetched the reward model.
    figures = read_figures(mlflow_text(cloud.mlflow, runs["parent"], FIGURES))
    assert {f"baseline/{name}/gain" for name in ("greedy", "best_of_4")} <= figures.keys()
    assert {"sft/rows", "cost/price", "reward_model/accuracy"} <= figures.keys()


def test_the_store_has_models_inputs_and_records(cloud: FlowInCloud, first: Execution):
    keys = cloud.objects("metaflow/rlhf/")
    run = f"metaflow/rlhf/runs/sfn-{first.name}/"
    for part in (
        *("metaflow/rlhf/inputs/policy-", "metaflow/rlhf/inputs/pairs.jsonl-"),
        *("metaflow/rlhf/cache/sft-", "metaflow/rlhf/cache/reward-model-"),
        "metaflow/rlhf/cache/policy-",
        *(f"{run}evaluation-", f"{run}reward-model.json-", f"{run}journal/"),
    ):
        assert any(key.startswith(part) for key in keys), part
    for name in ("journal.jsonl", "settings.toml", "samples.jsonl", "judgements.jsonl"):
        assert any(key.startswith(run) and key.endswith(f"/{name}") for key in keys), name


def test_no_result_of_a_step_names_a_path(cloud: FlowInCloud, first: Execution):
    """No artifact names a file of a job; but for the flow's own file, which Metaflow records."""
    s3 = cloud.machines.client("s3")
    folders = {f"{job.folder}/work/metaflow/outputs" for job in first.jobs}
    for key in cloud.objects("metaflow/RLHF/data/"):
        content = s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        if content.startswith(GZIP):
            content = gzip.decompress(content)
        for folder in folders:
            place = content.find(folder.encode())
            assert place < 0, content[max(place - 200, 0) : place + 100]


def test_a_second_run_reuses_what_was_trained(cloud: FlowInCloud, first: Execution):
    second = cloud.start()
    made = {"load_policy": "sft", "load_reward_model": "reward-model", "train_policy": "policy"}
    for step, name in made.items():
        assert f"{name}: made s3://" in log_of(first, step)
        assert f"{name}: reused s3://" in log_of(second, step)
    digests = [cloud.version(one).tags["model/policy"] for one in (first, second)]
    assert digests[0] == digests[1]
    assert curve(cloud, second) == [*range(1, UPDATES + 1)]


def after_first_copy(cloud: FlowInCloud, act: Callable[[Any], None]) -> threading.Thread:
    """Call `act` with the process of the job that has copied the first checkpoint of PPO."""

    def watch() -> None:
        # The manifest is written after all files of the copy.
        while not any(
            key.endswith("/ppo/machine-0/manifest.json") and key not in before
            for key in cloud.objects("metaflow/rlhf/runs/")
        ):
            time.sleep(0.05)
        act(cloud.machines.jobs.running[0])

    before = set(cloud.objects("metaflow/rlhf/runs/"))
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("kind", ["killed", "spot"])
def test_a_lost_machine_is_replaced(cloud: FlowInCloud, first: Execution, kind: str):
    """Its folder is gone; the next machine continues from the copy and ends with equal weights."""

    def kill(process: Any) -> None:
        os.killpg(process.pid, signal.SIGKILL)

    def take_spot_instance(process: Any) -> None:
        SPOT_NOTICE.write_text("")
        process.wait()
        SPOT_NOTICE.unlink()

    cloud.remove("metaflow/rlhf/cache/policy-")  # Otherwise the policy would be reused.
    act = kill if kind == "killed" else take_spot_instance
    watch = after_first_copy(cloud, act)
    ended = cloud.start()
    watch.join(timeout=1)
    assert not watch.is_alive(), "nothing was copied before the training ended"
    attempts = [job for job in ended.jobs if job.step == "train_policy"]
    assert [job.exit_code == 0 for job in attempts] == [False, True]
    assert re.search(r"The training continues from checkpoint-\d+", attempts[1].log)
    if kind == "spot":
        assert "or after a notice of AWS" in attempts[0].log
    tags = [cloud.version(one).tags["model/policy"] for one in (first, ended)]
    assert tags[0] == tags[1]
    assert curve(cloud, ended) == [*range(1, UPDATES + 1)]


# Two runs of the built-in task, beside what else the machine does.
@pytest.mark.timeout(3600)
def test_the_built_in_task_gives_the_figures_of_a_local_run(cloud: FlowInCloud, tmp_path: Path):
    # With the environment of a job: that of this process has variables of the tests' libraries.
    local = subprocess.run(
        [sys.executable, FLOW, "run", "--registered-model", "local"],
        cwd=tmp_path,
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "USERNAME": "tester",
        },
        capture_output=True,
        text=True,
    )
    assert local.returncode == 0, local.stdout + local.stderr
    here = client_of(tmp_path).get_model_version_by_alias("local", "champion")
    machine = cloud.machines.create(FLOW)
    ended = cloud.machines.start(machine, {"registered-model": "remote"})
    assert ended.status == "SUCCEEDED", ended.jobs[-1].log
    there = cloud.mlflow.get_model_version_by_alias("remote", "champion")
    assert there.tags["model/policy"] == here.tags["model/policy"]
    runs = cloud.mlflow.get_run(there.run_id), client_of(tmp_path).get_run(here.run_id)
    lineages = [
        {k: v for k, v in run.data.tags.items() if k.startswith(("data/", "model/", "seed"))}
        for run in runs
    ]
    assert lineages[0] == lineages[1] and len(lineages[0]) > 6
    rates = [{n: v for n, v in run.data.metrics.items() if "_vs_" in n} for run in runs]
    assert rates[0] == rates[1] and rates[0]
