"""Run PPO in separate processes on one or several machines."""

import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.inputs.flow_run import FlowRun
from pipeline.launch.commands import ONE_MACHINE, Machines
from pipeline.launch.job import ppo_config, write_job
from pipeline.launch.launcher import train
from pipeline.results import Change, PreparedModel, TrainedPolicy, ValidatedReward
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import track
from ppo_core.config.text_files import read_json_file
from ppo_core.data.folder_cache import digest_of_folder
from ppo_core.errors import ProcessError
from ppo_core.reporting.health import warnings_of
from ppo_core.reporting.metrics_file import METRICS_FILE, SELF_CHECK_FILE, read_metrics


def train_policy(
    settings: Settings,
    sft: PreparedModel,
    reward_model: PreparedModel,
    validation: ValidatedReward,
    run: FlowRun,
    machines: Any = None,
    attempt: str = "",
) -> TrainedPolicy | None:
    """Train the policy with PPO against the reward model.

    Args:
        settings: settings of the run.
        sft: the initial policy, which is also the reference policy.
        reward_model: the reward model.
        validation: result of validating the reward model.
        run: the run of the flow.
        machines: Metaflow's `current.parallel`; None for a single machine.
        attempt: text that is equal on all machines and differs between attempts of the step.

    Returns:
        On the first machine, which also tracks the training, the trained policy; on others, None.

    Raises:
        ProcessError: a process of the training failed.
    """
    here = _this_machine(machines, attempt)
    start = partial(
        write_job,
        settings,
        policy=sft.path,
        reward_model=reward_model.path,
        reward_bias=validation.bias,
        reward_gain=validation.gain,
        folder=run.folder / "ppo",
        policy_dir=run.folder / "policy",
    )
    run_job = partial(
        train,
        processes=settings.processes,
        machines=here,
        stall_minutes=settings.stall_minutes,
    )
    if here.index > 0:
        run_job(start())
        return None
    with track(run, "train_policy") as tracker:
        job = start()
        run_job(
            job,
            on_metrics=lambda update, metrics: tracker.step.log_metrics(metrics, step=update),
        )
        updates = read_metrics(job.parent / METRICS_FILE)
        warnings = warnings_of(ppo_config(settings), updates)
        if warnings:
            tracker.step.describe("Warnings", warnings)
        self_check = read_json_file(job.parent / SELF_CHECK_FILE, ProcessError)
        trained = _trained_policy(str(run.folder / "policy"), updates, warnings, self_check)
        cost = {
            "episodes_per_second": trained.episodes_per_second,
            "peak_rss_bytes": trained.peak_rss_bytes,
        }
        final = {name: value for name, value in updates[-1].items() if name != "update"}
        tracker.parent.log_metrics(final | cost)
    return trained


def _this_machine(machines: Any, attempt: str) -> Machines:
    if machines is None:
        return ONE_MACHINE
    return Machines(
        count=machines.num_nodes,
        index=machines.node_index,
        main_address=machines.main_ip,
        attempt=attempt,
    )


def _trained_policy(
    path: str,
    updates: list[dict[str, Any]],
    warnings: list[str],
    self_check: dict[str, str | float],
) -> TrainedPolicy:
    first, last = updates[0], updates[-1]
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
        self_check=self_check,
    )


def _peak_rss_bytes() -> int:
    """Return the peak memory in bytes of the largest child process; Linux reports KiB."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
