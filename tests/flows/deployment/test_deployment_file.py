"""A deployment file is read strictly: each mistake is refused at its place, with the way out."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployment.actions import check_settings
from deployment.deploy_flow import read_deployment_file
from deployment.deployment import Deployment
from deployment.deployment_file import (
    STEPS,
    STEPS_OF_SEVERAL_MACHINES,
    read_deployment,
)
from pipeline.settings.overrides import merge_tables
from ppo_core.errors import ConfigError
from tests.helpers.paths import ROOT
from tests.helpers.runs.canaries import CANARY, VARIABLES
from tests.helpers.runs.deployments import EXAMPLES, SCHEDULERS, example, write_deployment

TRAINING = {"start", "load_policy", "load_reward_model", "validate_reward_model", "train_policy"}


def changed(scheduler: str, **changes: Any) -> Deployment:
    return read_deployment(merge_tables(example(scheduler), changes))


def nested(place: str, value: Any) -> dict[str, Any]:
    """Tables with one value at a place such as steps.start.cpu."""
    first, dot, rest = place.partition(".")
    return {first: nested(rest, value) if dot else value}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_examples_are_deployments_of_valid_settings(scheduler: str):
    files = read_deployment_file(EXAMPLES / f"{scheduler}.toml")
    assert check_settings(files).registered_model == "rlhf-policy"
    assert files.deployment.scheduler == scheduler
    assert files.deployment.alarms.topic.startswith("arn:aws:sns:")
    assert files.deployment.alarms.gpu_hours == 24.0


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_examples_split_rights_and_secrets_by_duty(scheduler: str):
    deployment = changed(scheduler)
    duties = {"retrain": [deployment.retrain]}
    for step in STEPS:
        duty = (
            "train" if step in TRAINING else "judge" if step == "evaluate_win_rate" else "register"
        )
        duties.setdefault(duty, []).append(deployment.resources_of(step))
    for duty, steps in duties.items():
        for one in steps:
            assert (one.service_account or one.role.rpartition("/")[2]) == f"rlhf-{duty}"
            secrets = " ".join(one.secrets)
            assert ("judge" in secrets) == (duty == "judge")
            assert ("registry" in secrets) == (duty == "register")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_only_steps_that_compute_models_ask_for_gpus(scheduler: str):
    deployment = changed(scheduler)
    with_gpu = {step for step in STEPS if deployment.resources_of(step).gpu}
    assert with_gpu == {
        "load_reward_model",
        "validate_reward_model",
        "train_policy",
        "evaluate_win_rate",
    }
    assert deployment.retrain.gpu == deployment.resources_of("join_policy").gpu == 0


def test_without_a_file_nothing_is_deployed_and_no_alarm_is_sent():
    deployment = read_deployment({})
    assert deployment == Deployment()
    assert (deployment.alarms.topic, deployment.alarms.gpu_hours) == ("", 0.0)


def test_a_step_has_the_defaults_but_for_what_its_table_says():
    deployment = changed(
        "argo", steps={"register": {"cpu": 3, "environment": {"A": "1"}, "secrets": ["mine"]}}
    )
    register, start = (deployment.resources_of(step) for step in ("register", "start"))
    assert (register.cpu, start.cpu) == (3, 2)
    assert register.disk_gib == start.disk_gib == 40
    # Tables are merged, and a list replaces that of the defaults.
    assert register.environment == {**start.environment, "A": "1"}
    assert (register.secrets, start.secrets) == (["mine"], ["rlhf-mlflow"])


@pytest.mark.parametrize("nodes", [1, 4])
def test_the_names_of_the_steps_are_those_of_the_flow(nodes: int):
    words = ["flows/rlhf.py", "--config-value", "settings", f"num_nodes = {nodes}", "show"]
    shown = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    steps = re.findall(r"^Step (\w+)", shown.stdout + shown.stderr, re.MULTILINE)
    assert {*steps} == {*STEPS, *(STEPS_OF_SEVERAL_MACHINES if nodes > 1 else ())}


UNKNOWN = [
    ("schedular", "argo", "Unknown setting schedular. Did you mean scheduler?"),
    ("schedule.corn", "", "Unknown setting schedule.corn. Did you mean schedule.cron?"),
    ("alarms.gpu_hour", 1.0, "Unknown setting alarms.gpu_hour. Did you mean alarms.gpu_hours?"),
    ("defaults.memory", 1, "Unknown setting defaults.memory. Did you mean defaults.memory_gib?"),
    ("retrain.gpus", 1, "Unknown setting retrain.gpus. Did you mean retrain.gpu?"),
    ("steps.train", {}, "Unknown setting steps.train. Known here: start, load_policy,"),
    (
        "steps.train_polcy.gpu",
        1,
        "Unknown setting steps.train_polcy. Did you mean steps.train_policy?",
    ),
    ("steps.start.roles", "x", "Unknown setting steps.start.roles. Did you mean steps.start.role?"),
]

WRONG = [
    ("steps", 3, "steps=3 must be a section, [steps]."),
    ("steps.start", "big", "steps.start='big' must be a section, [steps.start]."),
    ("defaults", [], "defaults=[] must be a section, [defaults]."),
    (
        "scheduler",
        "airflow",
        "scheduler='airflow' must be one of empty, argo, step-functions.",
    ),
    ("defaults.cpu", "2", "defaults.cpu='2' must be a number."),
    ("timeout_hours", -1.0, "timeout_hours=-1.0 must be at least 0."),
    ("timeout_hours", float("nan"), "timeout_hours=nan must be a finite number."),
    (
        "timeout_hours",
        12.0,
        "stops a run after 720 minutes, but steps.train_policy.timeout_minutes=1440",
    ),
    (
        "retrain.timeout_minutes",
        20_000,
        "timeout_hours=168 stops a run after 10080 minutes, but retrain.timeout_minutes=20000",
    ),
    ("defaults.gpu", 0.5, "defaults.gpu=0.5 must be a whole number."),
    ("defaults.cpu", 0, "[defaults] cpu=0 must be above 0."),
    ("defaults.memory_gib", -1, "[defaults] memory_gib=-1 must be above 0."),
    ("steps.start.cpu", float("inf"), "[steps.start] cpu=inf must be a finite number."),
    ("steps.train_policy.gpu", -1, "[steps.train_policy] gpu=-1 must be at least 0."),
    ("steps.train_policy.retries", 5, "[steps.train_policy] retries=5 must be 0 to 4."),
    ("retrain.timeout_minutes", -5, "[retrain] timeout_minutes=-5 must be at least 0."),
    (
        "steps.start.gpu_type",
        "NVIDIA-L4",
        "gpu_type='NVIDIA-L4' must be empty for a step without GPUs.",
    ),
    (
        "steps.end.tolerations",
        ["gpu"],
        "['gpu'] must be taints, such as nvidia.com/gpu:NoSchedule.",
    ),
    (
        "steps.end.mounts",
        {"data": "mnt"},
        "mounts={'data': 'mnt'} must be a table of volumes with absolute paths.",
    ),
    ("steps.start.environment", {"A": 1}, "steps.start.environment.A=1 must be a text."),
    ("alarms.topic", "rlhf-alarms", "must be an ARN, arn:aws:sns:REGION:ACCOUNT:NAME."),
    ("alarms.gpu_hours", -1.0, "[alarms] gpu_hours=-1.0 must be at least 0."),
    (
        "project",
        "My-Project",
        "project='My-Project' must be small letters, digits and underscores.",
    ),
    ("project", "", "The file lacks project. infra/deployments has an example for each scheduler."),
    ("branch", "x" * 40, "of 58 characters. Metaflow would shorten it to 45"),
    ("image", "", "defaults has no image. Set image at the top of the deployment file."),
    ("schedule", {"cron": "0 3 * *"}, "has 4 fields, and argo reads 5. Write it as '0 3 * * MON'"),
    ("schedule.cron", "0 3 * * 1", "1 is Monday for Argo, and Sunday for EventBridge"),
    ("schedule.timezone", "Berlin", "schedule.timezone='Berlin' is unknown."),
    ("schedule.cron", "", "[schedule] timezone='Europe/Berlin' must be empty without cron."),
]

NOT_OF_ARGO = [
    ("schedule.cron", "0 3 ? * MON *", "has 6 fields, and argo reads 5"),
    ("defaults.role", "arn:aws:iam::1:role/x", "is not possible with argo. Rights on Kubernetes"),
    (
        "steps.start.queue",
        "cpu",
        "steps.start.queue='cpu' is not possible with argo. Kubernetes has no",
    ),
    (
        "steps.start.secrets",
        ["Not A Name"],
        "steps.start.secrets has a text that is not a name of a secret",
    ),
]

NOT_OF_STEP_FUNCTIONS = [
    ("schedule.timezone", "Europe/Berlin", "EventBridge reads cron in UTC. Write the hour in UTC"),
    ("schedule.event", "new", "only Argo starts flows at events. Set schedule.cron"),
    ("schedule.cron", "0 3 * * MON", "has 5 fields, and step-functions reads 6"),
    ("schedule.cron", "0 3 1 * MON *", "EventBridge reads one of them: write ? for the other"),
    ("schedule.cron", "0 3 ? * ? *", "must name either a day of the month or a day of the week"),
    ("schedule.cron", "0 3 ? * MON 2030", "names a year, after which nothing would start"),
    ("namespace", "rlhf", "step-functions, which has no namespaces"),
    ("steps.train_policy.gpu_type", "NVIDIA-L4", "Set queue to a queue with such machines"),
    ("steps.train_policy.node_selector", {"a": "b"}, "Set queue to a queue with such machines"),
    ("steps.train_policy.tolerations", ["a:NoSchedule"], "Set queue to a queue with such machines"),
    ("defaults.disk_gib", 40, "Set the disk size in the compute environment"),
    (
        "steps.train_policy.efa",
        1,
        "starts one machine per step, so EFA has no use. Deploy with argo",
    ),
    ("retrain.service_account", "rlhf", "retrain.service_account='rlhf' is not possible"),
    ("steps.end.role", "rlhf-train", "is not the ARN of a role, such as arn:aws:iam"),
    (
        "steps.end.mounts",
        {"data": "/data"},
        "names 'data', which is not an id of an EFS file system",
    ),
]


@pytest.mark.parametrize(("place", "value", "message"), [*UNKNOWN, *WRONG, *NOT_OF_ARGO])
def test_argo_refuses(place: str, value: Any, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_deployment(merge_tables(example("argo"), nested(place, value)))


@pytest.mark.parametrize(("place", "value", "message"), NOT_OF_STEP_FUNCTIONS)
def test_step_functions_refuses(place: str, value: Any, message: str):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_deployment(merge_tables(example("step-functions"), nested(place, value)))


SECRETS = [
    ("steps.evaluate_win_rate.environment.OPENAI_API_KEY", "anything", "by its name"),
    ("defaults.environment.OTHER", f"hf_{CANARY}OtherToken0123", "a token"),
    ("defaults.environment.SETTING", VARIABLES["SERVICE_PASSWORD"], "variable SERVICE_PASSWORD"),
    ("retrain.environment.MLFLOW_TRACKING_URI", f"http://me:{CANARY}x@host", "a user or password"),
    ("steps.start.secrets", [VARIABLES["OPENAI_API_KEY"]], "OPENAI_API_KEY"),
    ("alarms.topic", f"https://host/?token={CANARY}1", "an address with a token"),
    ("project", VARIABLES["SERVICE_PASSWORD"], "variable SERVICE_PASSWORD"),
]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("place", "value", "kind"), SECRETS, ids=[one[0] for one in SECRETS])
def test_a_secret_is_refused_by_its_place_and_not_shown(
    scheduler: str, place: str, value: Any, kind: str, monkeypatch: pytest.MonkeyPatch
):
    for name, secret in VARIABLES.items():
        monkeypatch.setenv(name, secret)
    with pytest.raises(ConfigError) as refused:
        read_deployment(merge_tables(example(scheduler), nested(place, value)))
    assert str(refused.value).startswith(f"{place} holds ")
    assert kind in str(refused.value)
    assert "name that secret in `secrets` of the steps" in str(refused.value)
    assert CANARY not in str(refused.value)


def test_a_judge_with_a_key_needs_a_secret_of_the_judging_step(tmp_path: Path):
    changes = {"steps": {"evaluate_win_rate": {"secrets": []}}}
    files = write_deployment(tmp_path, "argo", changes)
    with pytest.raises(ConfigError, match=r"name it in steps\.evaluate_win_rate\.secrets"):
        check_settings(files)
    own_server = {"judging": {"base_url": "http://judge.rlhf.svc:8000/v1"}}
    assert check_settings(write_deployment(tmp_path, "argo", changes, own_server))
    # A language model that is a reward is asked by the training step.
    rewards = {"rewards": ["openai:scorer"], "rewards_rubric": "rubric.md"}
    changes = {"steps": {"train_policy": {"secrets": []}}}
    with pytest.raises(ConfigError, match=r"name it in steps\.train_policy\.secrets"):
        check_settings(write_deployment(tmp_path, "argo", changes, rewards))
    assert check_settings(write_deployment(tmp_path, "argo", {}, rewards))


@pytest.mark.parametrize(
    ("changes", "step"),
    [({}, "load_reward_model"), ({"num_nodes": 2, "processes": 2}, "load_policy")],
    ids=["one machine", "two machines"],
)
def test_a_labeler_with_a_key_needs_a_secret_of_the_labeling_step(
    changes: dict[str, Any], step: str, tmp_path: Path
):
    settings = {"fresh_pairs": {"count": 64, "labeller": "openai:labeler"}, **changes}
    with pytest.raises(ConfigError, match=rf"fresh_pairs\.labeller=.* steps\.{step}\.secrets"):
        without = {"steps": {step: {"secrets": []}}}
        check_settings(write_deployment(tmp_path, "argo", without, settings))
    secret = {"steps": {step: {"secrets": ["labeler"]}}}
    assert check_settings(write_deployment(tmp_path, "argo", secret, settings))


def test_a_named_gpu_needs_a_number_of_processes(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"Set processes to the number of GPUs of steps\.train_p"):
        check_settings(write_deployment(tmp_path, "argo", settings={"processes": 0}))
    changes = {"steps": {"start": {"gpu": 1}}}
    assert check_settings(write_deployment(tmp_path, "argo", changes, {"processes": 0}))


def test_a_wrong_setting_is_refused_with_the_name_of_its_file(tmp_path: Path):
    files = write_deployment(tmp_path, "argo", settings={"ppo": {"lerning_rate": 1e-6}})
    with pytest.raises(ConfigError, match=r"qwen2.5-0.5b.toml: Unknown setting ppo.lerning_rate"):
        check_settings(files)
