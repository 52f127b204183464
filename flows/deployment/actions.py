"""Check, create, start, show and delete a deployment."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from deployment.deploy_flow import (
    FILES,
    DeploymentFiles,
    compile_flow,
    create_flow,
    delete_flow,
    start_flow,
)
from deployment.deployed_flow import DEPLOYED, tags_of
from deployment.deployment import JUDGING_STEP, TRAINING_STEP, Deployment
from deployment.overview import render_deployment, render_status
from pipeline.judges.judge_names import read_judges
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from ppo_core.config.reward_names import read_rewards
from ppo_core.errors import ConfigError
from ppo_core.errors.packages import require_package
from ppo_core.io.text_files import read_toml_file

if TYPE_CHECKING:
    from deployment.argo_scheduler import ArgoScheduler
    from deployment.step_functions_scheduler import StepFunctionsScheduler


def check_deployment(files: DeploymentFiles) -> None:
    """Compile both flows for the scheduler, and print what would be deployed.

    Raises:
        ConfigError: a setting is wrong, a training does not fit its machine or its time limit, or
            the scheduler would store a secret in clear text.
        ProcessError: Metaflow refuses a flow.
    """
    # Imported here, because `size_check` imports torch.
    from deployment.size_check import check_sizes

    settings = check_settings(files)
    sizes = check_sizes(files)
    # Render first, because rendering refuses a schedule without a next time.
    overview = render_deployment(files.deployment, tags_of(files), settings.num_nodes)
    for flow in FILES:
        compile_flow(files, flow)
    print(overview, "".join(f"{line}\n" for line in sizes), sep="", end="", flush=True)


def create_deployment(files: DeploymentFiles) -> None:
    """Deploy both flows, or change what is deployed.

    The flow RLHF is deployed first, because Retrain, which has the schedule, starts it.

    Raises:
        ConfigError: see `check_deployment`.
        ProcessError: Metaflow or the scheduler refuses a flow.
        StorageError: the scheduler does not answer.
    """
    check_deployment(files)
    scheduler = _scheduler_of(files.deployment)
    named = {**tags_of(files), DEPLOYED: f"{datetime.now(UTC):%Y-%m-%dT%H.%M.%SZ}"}
    tags = [word for name, value in named.items() for word in ("--tag", f"{name}:{value}")]
    for flow in FILES:
        create_flow(files, flow, *tags)
        scheduler.forbid_overlaps(flow)
        print(f"Deployed {scheduler.name_of(flow)}.", flush=True)


def start_deployment(files: DeploymentFiles, *, take_over: bool = False) -> None:
    """Start the deployed flow Retrain now; Retrain starts a training only if an input is new.

    After a failed run, the new run reuses all models that were trained from the same inputs.

    Args:
        files: the deployment and its files.
        take_over: whether Retrain takes the lease from the run that holds it.

    Raises:
        ConfigError: the flow is not deployed.
        ProcessError: Metaflow or the scheduler refuses the start.
        StorageError: the scheduler does not answer.
    """
    scheduler = _scheduler_of(files.deployment)
    name = scheduler.name_of("Retrain")
    if scheduler.find("Retrain") is None:
        raise ConfigError(f"{name} is not deployed. Deploy it first, with --create.")
    start_flow(files, "Retrain", *(["--take-over"] if take_over else []))
    print(f"Started {name}. --status has its result.", flush=True)


def delete_deployment(files: DeploymentFiles) -> None:
    """Delete both flows from the scheduler: first Retrain, because Retrain has the schedule.

    Raises:
        ConfigError: a run of RLHF is active; on Step Functions, the deletion would end the run.
        ProcessError: the scheduler refuses the deletion.
        StorageError: the scheduler does not answer.
    """
    scheduler = _scheduler_of(files.deployment)
    training = scheduler.find("RLHF")
    if training and training.running:
        raise ConfigError(
            f"The run {training.running} of {training.name} has not ended, so nothing was deleted: "
            "on Step Functions, the deletion would end the run. Wait for the end of the run, or "
            "stop the run in the UI of the scheduler, and repeat --delete. To stop only the "
            f"schedule, remove [schedule] from '{files.path}', and run --create: the run then "
            "continues."
        )
    for flow in reversed(FILES):
        if scheduler.find(flow) is None:
            print(f"{scheduler.name_of(flow)} is not deployed.", flush=True)
        else:
            delete_flow(files, flow)
            print(f"Deleted {scheduler.name_of(flow)}.", flush=True)


def show_deployment(files: DeploymentFiles) -> None:
    """Print the deployed flows with their settings and code, the next start, and the last result.

    Raises:
        StorageError: the scheduler does not answer.
    """
    scheduler = _scheduler_of(files.deployment)
    found = {flow: scheduler.find(flow) for flow in reversed(FILES)}
    print(render_status(found, tags_of(files)), end="", flush=True)


def _scheduler_of(deployment: Deployment) -> "ArgoScheduler | StepFunctionsScheduler":
    # Imported here, because each of these modules needs the client library of its scheduler.
    if deployment.scheduler == "argo":
        require_package("kubernetes", extra="deploy", needed_by="A deployment to Argo Workflows")
        from deployment.argo_scheduler import ArgoScheduler

        return ArgoScheduler(deployment)
    from deployment.step_functions_scheduler import StepFunctionsScheduler

    return StepFunctionsScheduler(deployment)


def check_settings(files: DeploymentFiles) -> Settings:
    """Return the settings of the runs after checking them.

    The inputs are not checked here; the first step of a run reads and checks them.

    Raises:
        ConfigError: a setting is wrong, a step that calls a server lacks a secret for the key, or
            the first step could not know the number of processes.
    """
    try:
        settings = make_settings(read_toml_file(files.settings, ConfigError), {})
        judges = read_judges(settings.judge) if settings.judge else []
    except ConfigError as error:
        raise ConfigError(f"{files.settings}: {error}") from error
    asked = [(f"judge={settings.judge!r}", one.kind, JUDGING_STEP) for one in judges]
    asked += [
        (f"rewards={one.spec!r}", one.kind, TRAINING_STEP) for one in read_rewards(settings.rewards)
    ]
    if labeller := settings.fresh_pairs.judge:
        labeling = ["load_policy" if settings.num_nodes > 1 else "load_reward_model"]
        labeling += [TRAINING_STEP] if settings.fresh_pairs.rounds > 1 else []
        asked += [
            (f"fresh_pairs.labeller={labeller!r}", one.kind, step)
            for one in read_judges(labeller)
            for step in labeling
        ]
    for named, kind, name in asked:
        step = files.deployment.resources_of(name)
        has_server = settings.judging.base_url or "OPENAI_BASE_URL" in step.environment
        if kind == "openai" and not has_server and not step.secrets:
            raise ConfigError(
                f"{named} needs a key, and steps.{name} has no secret. Store the key as "
                f"OPENAI_API_KEY in a secret of the scheduler, and name it in steps.{name}.secrets."
            )
    # See `processes_on_a_machine`, which the first step of each run calls.
    if settings.hardware.gpu and not (
        settings.processes or files.deployment.resources_of("start").gpu
    ):
        raise ConfigError(
            f"{files.settings}: hardware.gpu={settings.hardware.gpu!r} names the GPU, but the "
            "number of GPUs is unknown in the first step, which has none. Set processes to the "
            f"number of GPUs of steps.{TRAINING_STEP}."
        )
    return settings
