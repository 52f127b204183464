"""First step: read the settings, check all inputs, and create the run's records in MLflow."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from pipeline.cost.gpu_table import find_gpu, processes_on_a_machine
from pipeline.demo.task import find_demo_task
from pipeline.evaluation.guards.functions import load_guards
from pipeline.inputs.flow_run import QUARANTINE, SETTINGS_FILE, ChampionStart, FlowRun
from pipeline.inputs.lineage import EVALUATION_ROWS, Lineage, trace
from pipeline.inputs.model_digests import digest_of_model
from pipeline.inputs.replayed_pairs import inherited_rows, read_start_rows
from pipeline.inputs.row_digests import ROWS_FILE, write_digests
from pipeline.inputs.run_data import RunData
from pipeline.inputs.run_rewards import RunRewards
from pipeline.judges.make_judge import digest_of_own_files
from pipeline.preflight.check_inputs import check_inputs
from pipeline.preflight.fetch_inputs import fetch_inputs, share_inputs
from pipeline.preflight.remote_machine import refuse_proxied_artifacts
from pipeline.promotion.fetch_champion import find_champion
from pipeline.promotion.find_start import find_start
from pipeline.registry.seen_rows import describe_versions_that_saw
from pipeline.results.step_records import FetchedChampion
from pipeline.settings.make_settings import settings_text
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import shared_journal
from pipeline.storage.workspace import workspace_of
from pipeline.tracking.journal import Journal
from pipeline.tracking.killed_runs import end_failed_start, end_killed_runs
from pipeline.tracking.mlflow_client import check_databases, check_registry
from pipeline.tracking.mlflow_runs import artifact_root, log_data, start_runs
from pipeline.tracking.run_log import RunLog
from pipeline.tracking.run_record import PARENT, record_processes
from ppo_core.io.atomic_files import explained_writes, require_writable, write_atomically

__all__ = ["ended_if_it_fails", "find_champion", "prepare_inputs", "share_inputs", "start_run"]


def prepare_inputs(given: Settings, number: str = "") -> Settings:
    """Check every input; if `task` is set, first write the files of the built-in task.

    Args:
        given: settings of the user.
        number: Metaflow's id of the run; empty without a run. The lists of the rows that were left
            out are written into the run's folder.

    Returns:
        The settings; for a built-in task, the inputs are the files of the task.

    Raises:
        ConfigError: a setting is invalid, or S3 refuses to write into `store`.
        DataError: a data set cannot be used.
        ModelError: a model cannot be used, or MLflow does not answer.
        StorageError: S3 does not answer.
    """
    check_databases(is_written=True)
    find_gpu(given.hardware)
    processes_on_a_machine(given)
    workspace = workspace_of(given)
    workspace.check_access()
    settings = find_inputs(given)
    with workspace.sharing_rows():
        check_inputs(settings, workspace.folder_of_run(number) / QUARANTINE if number else None)
    check_registry(settings.registered_model)
    if settings.erase:
        _print_versions_that_saw(settings)
    refuse_proxied_artifacts(artifact_root(create=False), settings.policy)
    return settings


def _print_versions_that_saw(settings: Settings) -> None:
    """Print the earlier versions that were trained or judged on the rows of `erase`."""
    erased = RunData(settings).erased
    lines = describe_versions_that_saw(settings.registered_model, erased)
    print("\n".join(f"erase: {line}" for line in lines), flush=True)


def find_inputs(given: Settings) -> Settings:
    """Fetch the inputs, without checking them; return the settings with the inputs' local paths."""
    require_writable(Path(given.output_dir), "output_dir")
    return make_demo_task(given) if given.task else fetch_inputs(given)


def trace_run(name: str, given: Settings, settings: Settings) -> Lineage:
    """Return the lineage of a run: code, settings, data, given models, judges and guards.

    The tags of `start_from` are left out. Otherwise each new champion would make the flow Retrain
    start a training.

    Args:
        name: id of the run.
        given: settings before `find_inputs`.
        settings: settings whose inputs are on this machine.
    """
    data = RunData(settings)
    lineage = trace(flow_run=name, settings=asdict(given), data=data.by_use())
    lineage.tags[EVALUATION_ROWS] = data.digest_of_evaluation()
    lineage.tags["model/base"] = digest_of_model(settings.policy)
    if settings.reward_model:
        lineage.tags["model/reward_model"] = digest_of_model(settings.reward_model)
    rewards = RunRewards(data).digests()
    lineage.tags.update({f"reward/{name}": digest for name, digest in rewards.items()})
    lineage.tags.update(_digests_of_judges(settings))
    return lineage


def _digests_of_judges(settings: Settings) -> dict[str, str]:
    """Return the digests of judges and guards whose files can change under the same name."""
    judges = {"judge/judge": settings.judge, "judge/labeller": settings.fresh_pairs.judge}
    found = {tag: digest_of_own_files(spec) for tag, spec in judges.items() if spec}
    guards = load_guards(settings.promotion.guards)
    return {
        **{tag: digest for tag, digest in found.items() if digest},
        **{f"guard/{name}": guard.version for name, guard in guards.items()},
    }


def start_run(
    given: Settings,
    settings: Settings,
    flow: str,
    number: str,
    steps: Sequence[str],
    champion: FetchedChampion | None = None,
) -> FlowRun:
    """Create the folder and the MLflow runs of a run of the flow, and record its lineage.

    Args:
        given: settings as the user gave them; they are also valid on another machine.
        settings: settings that `prepare_inputs` returned.
        flow: name of the flow.
        number: Metaflow's id of the run.
        steps: names of the steps that get an MLflow run.
        champion: the champion. With `start_from`, this run starts from the reward model and the
            critic of the champion's run.

    Raises:
        ConfigError: see `find_start`; or MLflow does not answer.
        DataError, ModelError: see `find_start`.
    """
    refuse_proxied_artifacts(artifact_root(create=True), settings.policy)
    name = f"{flow}/{number}"
    found = find_start(settings, None if champion is None else champion.version)
    if found.text:
        print(found.text, flush=True)
    origin = trace_run(name, given, settings)
    origin.tags.update(found.tags)
    runs = start_runs(settings.registered_model, name, asdict(given), origin.tags, steps)
    run = FlowRun(
        id=name,
        workspace=workspace_of(settings),
        tracking=runs,
        origin=origin.tags,
        data=origin.data,
    )
    with ended_if_it_fails(run):
        run.folder.mkdir(parents=True, exist_ok=True)
        record_processes(run.folder)
        end_killed_runs(run.folder.parent, flow)
        log_data(runs[PARENT], origin.data)
        with shared_journal(run):
            _record_inputs(run, given, settings, found.start, origin.packages)
        return replace(run, start=run.workspace.publish_files(found.start))


@contextmanager
def ended_if_it_fails(run: FlowRun) -> Iterator[None]:
    """Return a context for the first step: if the step fails, end the MLflow runs of the run."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        with shared_journal(run):
            end_failed_start(run.folder, run.tracking, error)
        raise


def _record_inputs(
    run: FlowRun, given: Settings, settings: Settings, start: ChampionStart | None, packages: str
) -> None:
    """Write settings and digests of rows to the run's folder; log the settings and `packages`."""
    file = run.folder / SETTINGS_FILE
    with explained_writes(file):
        write_atomically(file, settings_text(given))
    inherited = None if start is None else inherited_rows(read_start_rows(start.path))
    write_digests(RunData(settings).digested(), run.folder / ROWS_FILE, inherited)
    parent = RunLog(Journal(run.folder), run.tracking[PARENT])
    parent.log_artifact(file)
    parent.log_text(packages, "packages.txt")


def make_demo_task(settings: Settings) -> Settings:
    """Return the settings with the files of the built-in task as inputs."""
    made = find_demo_task(workspace_of(settings).cache, settings.seed)
    return replace(
        settings,
        task="",
        policy=str(made / "base"),
        sft_data=str(made / "sft.jsonl"),
        preferences=str(made / "preferences-train.jsonl"),
        preferences_test=str(made / "preferences-test.jsonl"),
        prompts=str(made / "prompts-train.jsonl"),
        eval_prompts=str(made / "prompts-eval.jsonl"),
    )
