"""The stages of the flow: settings and paths in, paths and small numbers out.

Each stage imports what it needs when it runs: the flow is also parsed where nothing but
Metaflow is installed, and by the scheduler, which would wait for torch.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_core.distributed.process import large_imports

if TYPE_CHECKING:
    from pipeline.inputs.cache import Cached
    from pipeline.inputs.flow_run import FlowRun
    from pipeline.settings.settings import Settings
    from pipeline.tracking.tracker import Tracker

Result = dict[str, Any]
"""What a stage hands on: paths as text, and small numbers."""

SUPERVISED_CODE = (
    "ppo_core.data.chat_template",
    "ppo_core.data.prompts",
    "ppo_core.supervised.data",
    "ppo_core.supervised.loop",
    "ppo_core.supervised.training",
)
"""What decides how rows are encoded and models trained: a change there makes them anew."""


def read_settings(from_file: Mapping[str, Any], from_command_line: Mapping[str, Any]) -> Settings:
    """Read the settings strictly, before anything is made of them."""
    from pipeline.settings.settings import make_settings

    return make_settings(from_file, from_command_line)


def prepare(given: Settings) -> Settings:
    """The settings with files for a built-in task; every input that would fail later is refused."""
    with large_imports():
        from pipeline.preflight import check_inputs, require_writable
        from pipeline.tracking.mlflow_client import check_registry

    require_writable(Path(given.output_dir), "output_dir")
    settings = _make_demo_task(given) if given.task else given
    check_inputs(settings)
    check_registry(settings.registered_model)
    return settings


def start_run(given: Settings, settings: Settings, flow: str, number: str) -> FlowRun:
    """The run with its folder, its runs in MLflow, and what it comes from."""
    with large_imports():
        from pipeline.inputs import data_sets
        from pipeline.inputs.flow_run import SETTINGS_FILE, FlowRun
        from pipeline.inputs.lineage import trace
        from pipeline.settings.settings import as_plain_dict
        from pipeline.settings.settings_file import settings_text
        from pipeline.tracking.journal import Journal
        from pipeline.tracking.mlflow_inputs import log_data
        from pipeline.tracking.mlflow_runs import start_runs
        from pipeline.tracking.run_log import RunLog
        from pipeline.tracking.tracker import PARENT

    name = f"{flow}/{number}"
    folder = Path(settings.output_dir).absolute() / "runs" / number
    folder.mkdir(parents=True, exist_ok=True)
    origin = trace(flow_run=name, settings=as_plain_dict(given), data=data_sets.data_sets(settings))
    runs = start_runs(settings.registered_model, name, as_plain_dict(given), origin.tags)
    log_data(runs[PARENT], origin.data)
    (folder / SETTINGS_FILE).write_text(settings_text(given), encoding="utf-8")
    parent = RunLog(Journal(folder), runs[PARENT])
    parent.log_artifact(folder / SETTINGS_FILE)
    parent.log_text(origin.packages, "packages.txt")
    return FlowRun(id=name, folder=folder, tracking=runs, origin=origin.tags, data=origin.data)


def find_champion(settings: Settings) -> Result:
    """The champion that the new policy will be compared with, fetched and verified."""
    with large_imports():
        from pipeline.promotion.decide import find_champion

    return find_champion(settings)


def still_there(settings: Settings, champion: Result) -> Result:
    """The champion that a run has found, or the present one where its files are gone since.

    Between two steps the machine may be another, or a folder for what was fetched emptied.

    Raises:
        DataError: as `promotion.find_champion`.
        ModelError: as `promotion.find_champion`.
    """
    if champion["version"] is None or Path(champion["model"]).is_dir():
        return champion
    return find_champion(settings)


def load_policy(settings: Settings, run: FlowRun) -> Result:
    """The policy to start from: as it is, or fine-tuned on `sft_data`."""
    with large_imports():
        from pipeline.inputs import cache, data_sets

    def train(folder: Path) -> dict[str, float]:
        with large_imports():
            from ppo_core.supervised.training import train_sft

        return train_sft(settings.policy, rows.usable, settings.sft, folder)

    with _track(run, "load_policy", patient=True) as tracker:
        if not settings.sft_data:
            return {"path": settings.policy, "metrics": {}}
        rows = data_sets.sft_rows(settings)
        made = cache.make_once(
            _cache_folder(settings),
            "sft",
            {
                "model": cache.digest_of_model(settings.policy),
                "rows": rows.digest,
                "settings": asdict(settings.sft),
                "code": cache.digest_of_code(*SUPERVISED_CODE),
            },
            train,
        )
        return _made(made, tracker)


def load_reward_model(settings: Settings, sft: Result, run: FlowRun) -> Result:
    """The reward model: the one that is named, or one trained from the policy."""
    with large_imports():
        from pipeline.inputs import cache, data_sets

    training = settings.reward_model_training

    def train(folder: Path) -> dict[str, float]:
        with large_imports():
            from ppo_core.supervised.training import train_reward_model

        return train_reward_model(sft["path"], rows.usable, training, folder)

    with _track(run, "load_reward_model", patient=True) as tracker:
        if settings.reward_model:
            return {"path": settings.reward_model, "metrics": {}}
        rows = data_sets.training_pairs(settings)
        made = cache.make_once(
            _cache_folder(settings),
            "reward-model",
            {
                "model": cache.digest_of_model(sft["path"]),
                "rows": rows.digest,
                "settings": asdict(training),
                "code": cache.digest_of_code(*SUPERVISED_CODE),
            },
            train,
        )
        return _made(made, tracker)


def validate_reward_model(
    settings: Settings, sft: Result, reward_model: Result, run: FlowRun
) -> Result:
    """What there is to know about the reward model before anything is trained against it."""
    with large_imports():
        from pipeline.reports.log_reports import log_reward_report

    with _track(run, "validate_reward_model", patient=True) as tracker:
        report = examine_reward_model(settings, sft, reward_model)
        report["accepted_by_hand"] = settings.accept_reward_model and not report["fit"]
        log_reward_report(tracker, report)
    return report


def examine_reward_model(settings: Settings, sft: Result, reward_model: Result) -> Result:
    """The report on the reward model, as `reward_validation.validate` gives it."""
    with large_imports():
        from pipeline.inputs import data_sets
        from pipeline.reward_validation.samples import draw_samples
        from pipeline.reward_validation.validate import validate
        from pipeline.settings.decoding import Decoding
        from ppo_core.models.loading import load_reward_model

    model = load_reward_model(
        reward_model["path"], end_of_text=settings.reward_model_training.end_of_text
    )
    return validate(
        model,
        data_sets.test_pairs(settings),
        data_sets.training_prompts(settings),
        partial(
            draw_samples,
            sft["path"],
            decoding=Decoding(
                response_length=settings.ppo.response_length,
                temperature=settings.ppo.temperature,
                stop_token=settings.ppo.stop_token,
                stop_token_id=settings.ppo.stop_token_id,
            ),
            seed=settings.seed,
            batch_size=settings.ppo.local_rollout_forward_batch_size,
        ),
        settings.reward_gate,
        seed=settings.seed,
    )


def require_fit_reward_model(validation: Result) -> None:
    """Stop before training where the reward model was refused, unless a person accepted it.

    Raises:
        ModelError: it was refused; the message has every reason.
    """
    from ppo_core.errors import ModelError

    if validation["fit"]:
        return
    reasons = "\n".join(f"- {reason}" for reason in validation["reasons"])
    if validation["accepted_by_hand"]:
        print(f"The reward model was refused and is accepted by hand:\n{reasons}", flush=True)
        return
    raise ModelError(
        f"The reward model is not fit to train against:\n{reasons}\nPPO would learn its faults. "
        "Mend it, or change the limits in [reward_gate], or run again with "
        "--accept-reward-model; what is trained already is reused."
    )


def train_policy(
    settings: Settings,
    sft: Result,
    reward_model: Result,
    validation: Result,
    run: FlowRun,
    machines: Any = None,
    attempt: str = "",
) -> Result:
    """Train the policy with PPO against the reward model, in processes of their own.

    `machines` is Metaflow's `current.parallel`, and `attempt` the same for all of them and another
    one each time. Each of several machines runs its processes; the first one tracks them and has
    the result, and that of the others is empty.
    """
    with large_imports():
        from pipeline.launch.commands import Machines
        from pipeline.launch.job import write_job
        from pipeline.launch.launcher import train
        from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics

    here = Machines()
    if machines is not None:
        here = Machines(
            count=machines.num_nodes,
            index=machines.node_index,
            main_address=machines.main_ip,
            attempt=attempt,
        )
    start = partial(
        write_job,
        settings,
        policy=sft["path"],
        reward_model=reward_model["path"],
        reward_bias=validation["bias"],
        reward_gain=validation["gain"],
        folder=run.folder / "ppo",
        policy_dir=run.folder / "policy",
    )
    if here.index > 0:
        train(start(), processes=settings.processes, machines=here)
        return {}
    with _track(run, "train_policy") as tracker:
        require_fit_reward_model(validation)
        job = start()
        train(
            job,
            processes=settings.processes,
            machines=here,
            on_metrics=lambda update, metrics: tracker.step.log_metrics(metrics, step=update),
        )
        updates = read_metrics(job.parent / METRICS_FILE)
        first, last = updates[0], updates[-1]
        cost = {
            "episodes_per_second": last["eps"],
            "peak_rss_bytes": _peak_rss_bytes(),
        }
        final = {name: value for name, value in last.items() if name != "update"}
        tracker.parent.log_metrics(final | cost)
    return {
        "path": str(run.folder / "policy"),
        "objective": {
            name: {"first": first[name], "last": final[name]} for name in first if name in final
        },
        **cost,
    }


def evaluate_win_rate(
    settings: Settings, sft: Result, policy: Result, champion: Result, run: FlowRun
) -> Result:
    """Judge the answers of the policy against the references, SFT and the champion."""
    with large_imports():
        from pipeline.evaluation.evaluate_policies import evaluate_policies
        from pipeline.reports.log_reports import log_evaluation

    with _track(run, "evaluate_win_rate", patient=True) as tracker:
        champion = still_there(settings, champion)
        evaluation = evaluate_policies(settings, sft["path"], policy["path"], champion, run.folder)
        log_evaluation(tracker, evaluation)
    return evaluation


def register(
    settings: Settings,
    sft: Result,
    reward_model: Result,
    validation: Result,
    trained: Result,
    evaluation: Result,
    run: FlowRun,
) -> Result:
    """Register the policy as a version, and promote or refuse it."""
    with large_imports():
        from pipeline.promotion.register import Candidate, register

    with _track(run, "register") as tracker:
        # What a version was measured by is there before the version.
        tracker.require_all_sent()
        candidate = Candidate(
            settings=settings,
            run=run,
            sft=sft,
            reward_model=reward_model,
            trained=trained,
            validation=validation,
            evaluation=evaluation,
        )
        registered = register(candidate)
        if registered["evaluation"] != evaluation:
            from pipeline.reports.log_reports import log_evaluation

            log_evaluation(tracker, registered["evaluation"])
        decision = registered["promotion"]
        tracker.parent.set_tags(
            {"version": str(decision["version"]), "promotion": decision["action"]}
        )
    return {**registered, "kl": candidate.kl}


def reward_model_card(validation: Result) -> list[Any]:
    """What a person looks at after the validation."""
    from pipeline.reports.cards import reward_model_card

    return reward_model_card(validation)


def evaluation_card(evaluation: Result) -> list[Any]:
    """What a person looks at after the evaluation."""
    from pipeline.reports.cards import evaluation_card

    return evaluation_card(evaluation)


def promotion_card(settings: Settings, validation: Result, registered: Result) -> list[Any]:
    """What a person looks at after the decision."""
    from pipeline.reports.cards import promotion_card

    return promotion_card(
        registered["promotion"],
        registered["evaluation"],
        validation,
        settings.promotion,
        kl=registered["kl"],
    )


def summarize(
    settings: Settings,
    validation: Result,
    policy: Result,
    registered: Result,
    run: FlowRun,
    seconds: Mapping[str, float],
) -> Result:
    """The whole run as one plain dict: shown, written and kept beside the version."""
    from pipeline.reports.terminal import render_summary
    from pipeline.settings.settings import as_plain_dict
    from pipeline.tracking.tracker import PARENT

    summary = {
        **registered["evaluation"],
        "reward_model": validation,
        "objective": policy["objective"],
        "timings": {
            "seconds": dict(seconds),
            "episodes_per_second": policy["episodes_per_second"],
            "peak_rss_bytes": policy["peak_rss_bytes"],
        },
        "model": registered["model"],
        "promotion": registered["promotion"],
        "settings": as_plain_dict(settings),
    }
    with _track(run, PARENT) as tracker:
        tracker.parent.log_json(summary, "summary.json")
        tracker.require_all_sent()
    if settings.summary_json:
        Path(settings.summary_json).write_text(json.dumps(summary, indent=2), encoding="utf-8")
    print(render_summary(summary), flush=True)
    return summary


def _make_demo_task(settings: Settings) -> Settings:
    """The same settings with the files of the built-in task as inputs."""
    from pipeline.demo.task import find_demo_task

    made = find_demo_task(_cache_folder(settings), settings.seed)
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


def _track(run: FlowRun, step: str, *, patient: bool = False) -> Tracker:
    """Tracks a step in MLflow while its context lasts.

    A `patient` one works in this process and tells little before its end: MLflow is imported
    beside it only if it takes long, and what a short one tells is sent by the next.
    """
    from pipeline.tracking.tracker import SHORT_SECONDS, Tracker

    return Tracker(run.folder, run.tracking, step, patience=SHORT_SECONDS if patient else 0.0)


def _made(made: Cached, tracker: Tracker) -> Result:
    """A folder of the cache as a result, and how it came about as metrics."""
    tracker.step.log_metrics(made.metrics)
    tracker.step.set_tags({"reused": str(made.reused)})
    return {"path": str(made.path), "metrics": made.metrics}


def _cache_folder(settings: Settings) -> Path:
    return Path(settings.output_dir) / "cache"


def _peak_rss_bytes() -> int:
    """Most memory that one process of the training held; Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
