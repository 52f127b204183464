"""Run PPO in separate processes on one or several machines."""

import resource
import sys
from pathlib import Path
from typing import Any

from pipeline.evaluation.results import Change, PreparedModel, TrainedPolicy, ValidatedReward
from pipeline.inputs.flow_run import FlowRun
from pipeline.launch.commands import ONE_MACHINE, Machines
from pipeline.launch.job import ppo_config, write_job
from pipeline.launch.launcher import train
from pipeline.launch.mirror import mirrored
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import track
from ppo_core.config.text_files import read_json_file
from ppo_core.data.folder_cache import digest_of_folder
from ppo_core.errors import ProcessError
from ppo_core.reporting.health import warnings_of
from ppo_core.reporting.metrics_file import METRICS_FILE, SELF_CHECK_FILE, read_metrics


def this_machine(parallel: Any, attempt: str) -> Machines:
    """Return the machines of a step with Metaflow's `current.parallel`, as this machine sees them.

    See `Machines.attempt` for the attempt.
    """
    return Machines(
        count=parallel.num_nodes,
        index=parallel.node_index,
        main_address=parallel.main_ip,
        attempt=attempt,
    )


def train_policy(
    settings: Settings,
    sft: PreparedModel,
    reward_model: PreparedModel,
    validation: ValidatedReward,
    run: FlowRun,
    here: Machines = ONE_MACHINE,
) -> TrainedPolicy:
    """Train the policy with PPO against the reward model, and track the training.

    Args:
        settings: settings of the run.
        sft: the initial policy, which is also the reference policy.
        reward_model: the reward model.
        validation: result of validating the reward model.
        run: the run of the flow.
        here: the machines of the training; the others call `help_to_train_policy` meanwhile.

    Raises:
        ProcessError: a process of the training failed.
    """
    with track(run, "train_policy") as tracker:
        with mirrored(run.workspace, run.folder / "ppo", here):
            job = _write_job(settings, sft, reward_model, validation, run)
            train(
                job,
                processes=settings.processes,
                machines=here,
                stall_minutes=settings.stall_minutes,
                on_metrics=lambda update, metrics: tracker.step.log_metrics(metrics, step=update),
            )
        updates = read_metrics(job.parent / METRICS_FILE)
        warnings = warnings_of(ppo_config(settings), updates)
        if warnings:
            tracker.step.describe("Warnings", warnings)
        self_check = read_json_file(job.parent / SELF_CHECK_FILE, ProcessError)
        trained = _trained_policy(
            str(run.folder / "policy"), updates, warnings, self_check, settings.ppo.num_ppo_epochs
        )
        cost = {
            "episodes_per_second": trained.episodes_per_second,
            "peak_rss_bytes": trained.peak_rss_bytes,
        }
        final = {name: value for name, value in updates[-1].items() if name != "update"}
        tracker.parent.log_metrics(final | cost)
        return run.workspace.share(trained)


def help_to_train_policy(
    settings: Settings,
    sft: PreparedModel,
    reward_model: PreparedModel,
    validation: ValidatedReward,
    run: FlowRun,
    here: Machines,
) -> None:
    """Take part in the training of `train_policy`, as a machine after the first."""
    with mirrored(run.workspace, run.folder / "ppo", here):
        train(
            _write_job(settings, sft, reward_model, validation, run),
            processes=settings.processes,
            machines=here,
            stall_minutes=settings.stall_minutes,
        )


def _write_job(
    settings: Settings,
    sft: PreparedModel,
    reward_model: PreparedModel,
    validation: ValidatedReward,
    run: FlowRun,
) -> Path:
    at_hand = run.workspace.at_hand
    return write_job(
        at_hand(settings),
        policy=at_hand(sft).path,
        reward_model=at_hand(reward_model).path,
        reward_bias=validation.bias,
        reward_gain=validation.gain,
        folder=run.folder / "ppo",
        policy_dir=run.folder / "policy",
    )


def _trained_policy(
    path: str,
    updates: list[dict[str, Any]],
    warnings: list[str],
    self_check: dict[str, str | float],
    epochs: int,
) -> TrainedPolicy:
    first, last = updates[0], updates[-1]
    sampled = _tokens_sampled(updates)
    return TrainedPolicy(
        path=path,
        digest=digest_of_folder(Path(path)),
        objective={
            name: Change(first=first[name], last=last[name])
            for name in first
            if name in last and name != "update"
        },
        warnings=warnings,
        episodes_per_second=last["eps"],
        peak_rss_bytes=_peak_rss_bytes(),
        tokens_sampled=sampled,
        tokens_trained=sampled * epochs,
        self_check=self_check,
    )


def _tokens_sampled(updates: list[dict[str, Any]]) -> int:
    """Return the tokens of all responses: mean length x responses of each update."""
    tokens = episodes = 0.0
    for update in updates:
        tokens += update["val/response_length"] * (update["episode"] - episodes)
        episodes = update["episode"]
    return round(tokens)


def _peak_rss_bytes() -> int:
    """Return the peak memory in bytes of the largest child process; Linux reports KiB."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
