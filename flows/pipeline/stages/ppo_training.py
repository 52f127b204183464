"""Run PPO in separate processes on one or several machines."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from pipeline.inputs.flow_run import CRITIC, PPO, ChampionStart, FlowRun
from pipeline.inputs.model_digests import require_recorded
from pipeline.inputs.run_data import RunData
from pipeline.inputs.run_rewards import RunRewards
from pipeline.judges.judge_budget import Spent, read_spent, sum_spent
from pipeline.judges.llm_reward.job import PROGRAM as RUBRIC_PROGRAM
from pipeline.judges.llm_reward.job import job_of_run, write_rubric_job
from pipeline.launch.checkpoint_mirror import SPENT_FILE, mirrored
from pipeline.launch.commands import ONE_MACHINE, Machines, gpus
from pipeline.launch.commands import PPO as PPO_PROGRAM
from pipeline.launch.forked_processes import used_by_children
from pipeline.launch.job import (
    JobModels,
    Pause,
    ppo_config,
    updates_of_ppo,
    write_job,
)
from pipeline.launch.launcher import OnMetrics, train
from pipeline.reports.live.live_view import LiveView
from pipeline.results.step_records import (
    Change,
    EarlierPolicies,
    FreshPairs,
    PreparedModel,
    RewardRound,
    TrainedPolicy,
    ValidatedReward,
    WatchedPrompt,
)
from pipeline.results.watched_prompts import read_watched
from pipeline.settings.settings import Settings
from pipeline.stages.rounds import Costs, Rounds, ScaledReward, decides_the_rounds
from pipeline.stages.tracked import card_of_step, stage, with_files
from pipeline.storage.cached_results import (
    MadeModel,
    as_values,
    can_be_reused,
    make_or_reuse,
    move_files,
)
from pipeline.tracking.tracker import Tracker
from ppo_core.checkpointing.folders import POLICIES
from ppo_core.errors import DataError, ProcessError
from ppo_core.io.folder_cache import digest_of, digest_of_code
from ppo_core.io.imported_modules import imported_modules
from ppo_core.io.text_files import read_json_file
from ppo_core.io.validation import read_record
from ppo_core.reporting.diagnosis import diagnose
from ppo_core.reporting.metrics_file import METRICS_FILE, SELF_CHECK_FILE, UPDATE, read_metrics

POLICY = "policy"
"""Name of the policy's folder in the folder of the run, and first part of the name of the policy's
folder in the cache."""

EARLIER = "earlier-policies"
"""Name of the policies that PPO saved before its end, and first part of the name of their folder in
the cache."""

_SOURCES = {EARLIER: f"{PPO}/{POLICIES}", CRITIC: f"{PPO}/{CRITIC}"}
"""Results of PPO besides the policy: name -> path in the folder of the run."""

CODE = "ppo_core.__main__"
"""Entry module of the training. Its code and its imports are part of the cache key."""


@dataclass(frozen=True, kw_only=True)
class _PolicyValues:
    """What the cache stores about a policy besides its files; fields that are None are left out."""

    updates: list[dict[str, Any]]
    """Metrics of each update, by name; the metric UPDATE is the number of the update."""

    self_check: dict[str, str | float]
    peak_rss_bytes: int
    watched: list[WatchedPrompt]

    run: str = ""
    """Id of the run that has trained the policy."""

    rounds: list[RewardRound] | None = None
    """Reward models of the rounds after the first; None with one round."""

    spent: dict[str, Spent] | None = None
    """Calls and tokens of the labelers of these rounds, by name; None with one round."""

    rewards_spent: dict[str, Spent] | None = None
    """Calls and tokens of language models that are rewards; None if there are none."""


def this_machine(parallel: Any, attempt: str) -> Machines:
    """Return the machines of a step, with the index of this machine, from `current.parallel`.

    See `Machines.attempt` for the argument `attempt`.
    """
    return Machines(
        count=parallel.num_nodes,
        index=parallel.node_index,
        main_address=parallel.main_ip,
        attempt=attempt,
    )


@stage("train_policy", "settings")
def train_policy(
    tracker: Tracker,
    settings: Settings,
    sft: PreparedModel,
    reward_model: PreparedModel,
    validation: ValidatedReward,
    run: FlowRun,
    here: Machines = ONE_MACHINE,
    fresh: FreshPairs | None = None,
) -> TrainedPolicy:
    """Train the policy with PPO against the reward model, and track the training.

    If an earlier run has trained a policy from the same inputs, that policy is reused; the earlier
    run may have failed in a later step. The metrics of the reused training are tracked again.

    Args:
        tracker: tracker of the step; the decorator `stage` passes it.
        settings: settings of the run.
        sft: the initial policy, which is also the reference policy.
        reward_model: the reward model.
        validation: result of validating the reward model.
        run: the run of the flow.
        here: the machines of the training. This function runs on the first machine; at the same
            time, the other machines call `train_policy_as_worker`.
        fresh: labeled pairs of samples of `sft`, for the first round.

    Raises:
        ProcessError: a process of the training failed.
    """
    data = RunData(settings)
    reward = _scaled(reward_model, validation)
    view = LiveView(run, settings, tracker, card_of_step())

    def log_update(update: int, metrics: Mapping[str, float]) -> None:
        tracker.parent.log_metrics(metrics, step=update)

    def train_all(on_metrics: OnMetrics) -> tuple[list[RewardRound], Costs] | tuple[None, None]:
        if fresh is None or settings.fresh_pairs.rounds == 1:
            _train(data, sft, reward, run, here, on_metrics)
            return None, None
        return _train_in_rounds(tracker, data, sft, reward, fresh, run, inputs, on_metrics)

    def train_in(folder: Path) -> dict[str, Any]:
        rounds, spent = train_all(log_update)
        return as_values(_move_policy(run, folder, rounds, spent))

    # `cache`: PPO is trained at most once, even if several results are missing.
    @cache
    def train_again() -> None:
        # No metrics are logged, because they equal the metrics of the reused policy.
        train_all(lambda update, metrics: None)

    inputs = _decides_the_result(data, sft, reward_model, validation, fresh, run.start)
    with view.watching():
        made = make_or_reuse(run.workspace, POLICY, inputs, train_in)
        beside = {
            name: _copied_once(run, name, needed, train_again if made.reused else None)
            for name, needed in _beside_the_policy(data, inputs).items()
        }
        values = read_record(made.values, _PolicyValues)
        if made.reused:
            for metrics in values.updates:
                log_update(metrics[UPDATE], _without_number(metrics))
    for folder in (*_SOURCES.values(), POLICY):
        shutil.rmtree(run.folder / folder, ignore_errors=True)
    return _track_policy(tracker, made, values, beside, run, settings)


def _track_policy(
    tracker: Tracker,
    made: MadeModel,
    values: _PolicyValues,
    beside: Mapping[str, MadeModel],
    run: FlowRun,
    settings: Settings,
) -> TrainedPolicy:
    """Track the warnings and the last metrics of a training; return its policy."""
    warnings = [str(finding) for finding in diagnose(ppo_config(settings), values.updates)]
    if warnings:
        tracker.step.describe("Warnings", warnings)
    tracker.step.set_tags({"reused": str(made.reused)})
    tracker.parent.set_tags({"self_check": json.dumps(values.self_check)})
    trained = _trained_policy(made, values, beside, warnings, run, settings.ppo.num_ppo_epochs)
    tracker.parent.log_figures(
        {
            "episodes_per_second": trained.episodes_per_second,
            "peak_rss_bytes": trained.peak_rss_bytes,
        }
    )
    return trained


@with_files("settings")
def train_policy_as_worker(
    settings: Settings,
    sft: PreparedModel,
    reward_model: PreparedModel,
    validation: ValidatedReward,
    run: FlowRun,
    here: Machines,
) -> None:
    """Run this machine's processes of `train_policy`; called on all machines except the first."""
    data = RunData(settings)
    inputs = _decides_the_result(data, sft, reward_model, validation, start=run.start)
    needed = {POLICY: inputs, **_beside_the_policy(data, inputs)}
    if not all(can_be_reused(run.workspace, *each) for each in needed.items()):
        reward = _scaled(reward_model, validation)
        _train(data, sft, reward, run, here, lambda update, metrics: None)


def _scaled(reward_model: PreparedModel, validation: ValidatedReward) -> ScaledReward:
    return ScaledReward(model=reward_model, bias=validation.bias, gain=validation.gain)


def _move_policy(
    run: FlowRun, folder: Path, rounds: list[RewardRound] | None, spent: Costs | None
) -> _PolicyValues:
    """Move the policy of a finished training into a folder of the cache; return its values."""
    job, policy = run.folder / PPO, run.folder / POLICY
    move_files(policy, folder)
    policy.rmdir()
    return _PolicyValues(
        updates=read_metrics(job / METRICS_FILE),
        self_check=read_json_file(job / SELF_CHECK_FILE, ProcessError),
        peak_rss_bytes=used_by_children().peak_rss_bytes,
        watched=_watched(job),
        run=run.id,
        rounds=rounds,
        spent=spent,
        rewards_spent=read_spent(job / SPENT_FILE) or None,
    )


def _watched(job: Path) -> list[WatchedPrompt]:
    """Return the watched prompts; only the page needs them, so a damaged file causes a warning."""
    try:
        return read_watched(job)
    except DataError as error:
        print(f"Warning: The page of the run shows no answers during PPO: {error}", flush=True)
        return []


def _copied_once(
    run: FlowRun, name: str, inputs: Mapping[str, Any], train: Callable[[], None] | None
) -> MadeModel:
    """Return a result of PPO other than the policy, from the cache if possible.

    `name` is a key of `_SOURCES`, and `inputs` is everything that the result depends on. If the
    result is missing, `train` trains the policy; `train` is None if the run has just trained.
    """

    def copy_into(folder: Path) -> dict[str, Any]:
        if train is not None:
            train()
        # Copied, not moved: if this process is killed, a resumed training needs these files again.
        shutil.copytree(run.folder / _SOURCES[name], folder, dirs_exist_ok=True)
        return {"run": run.id}

    return make_or_reuse(run.workspace, name, inputs, copy_into)


def _beside_the_policy(data: RunData, inputs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the cache inputs of PPO's results besides the policy; `inputs` are the policy's."""
    settings, needed = data.settings, {}
    if saved := settings.ppo.save_policies:
        needed[EARLIER] = {**inputs, "save_policies": saved}
    if settings.start_from:
        needed[CRITIC] = dict(inputs)
    return needed


def _decides_the_result(
    data: RunData,
    sft: PreparedModel,
    reward_model: PreparedModel,
    validation: ValidatedReward,
    fresh: FreshPairs | None = None,
    start: ChampionStart | None = None,
) -> dict[str, Any]:
    """Return everything that the trained policy depends on, as inputs of the cache."""
    settings, config = data.settings, data.settings.ppo
    processes = (settings.processes or gpus() or 1) * settings.num_nodes
    per_process = config.per_device_train_batch_size * config.gradient_accumulation_steps
    return {
        "policy": sft.digest,
        "reward_model": reward_model.digest,
        # Four digits, because bias and gain differ by rounding errors between machines.
        "bias": f"{validation.bias:.4g}",
        "gain": f"{validation.gain:.4g}",
        "end_of_text": settings.reward_model_training.end_of_text,
        "prompts": data.training_prompts().digest,
        "prompt_format": settings.prompt_format,
        "settings": config.settings_of_result(),
        "batch_size": config.batch_size or per_process * processes,
        "lora": asdict(settings.lora),
        "code": digest_of_code(*imported_modules(CODE)),
        **RunRewards(data).decides_the_result(),
        **decides_the_rounds(data, fresh),
        **({"start": start.digest} if start else {}),
    }


def _train(
    data: RunData,
    sft: PreparedModel,
    reward: ScaledReward,
    run: FlowRun,
    here: Machines,
    on_metrics: OnMetrics,
) -> None:
    with mirrored(run.workspace, run.folder / PPO, here):
        _train_part(data, sft, run, here, on_metrics, reward)


def _train_in_rounds(
    tracker: Tracker,
    data: RunData,
    sft: PreparedModel,
    reward: ScaledReward,
    fresh: FreshPairs,
    run: FlowRun,
    inputs: Mapping[str, Any],
    on_metrics: OnMetrics,
) -> tuple[list[RewardRound], Costs]:
    """Train or resume in rounds; return the later rounds' reward models and labeling costs."""
    with mirrored(run.workspace, run.folder / PPO):
        rounds = Rounds(
            tracker=tracker,
            data=data,
            run=run,
            sft=sft,
            policy=PreparedModel(
                path=str(run.folder / POLICY), digest=digest_of(inputs), metrics={}
            ),
            updates=updates_of_ppo(data.settings, len(data.training_prompts())),
            train_part=partial(_train_part, data, sft, run, ONE_MACHINE, on_metrics),
        )
        return rounds.train(reward, fresh)


def _train_part(
    data: RunData,
    sft: PreparedModel,
    run: FlowRun,
    here: Machines,
    on_metrics: OnMetrics,
    reward: ScaledReward,
    pause: Pause | None = None,
) -> None:
    """Train up to the pause, or to the end, from the newest checkpoint.

    Raises:
        ModelError: the files of a model were changed after the run read them.
    """
    fetch = run.workspace.fetch_files
    rewards, settings = RunRewards(data), data.settings
    start = fetch(run.start)
    policy, reward_model = fetch(sft), fetch(reward.model)
    require_recorded(policy.path, policy.digest, "policy")
    require_recorded(reward_model.path, reward_model.digest, "reward model")
    models = JobModels(
        policy=policy.path,
        reward_model=reward_model.path,
        reward_bias=reward.bias,
        reward_gain=reward.gain,
        critic=None if start is None else str(Path(start.path) / CRITIC),
    )
    job = write_job(
        rewards,
        models,
        folder=run.folder / PPO,
        policy_dir=run.folder / POLICY,
        pause=pause,
    )
    if rewards.language_models:
        processes = settings.processes or gpus() or 1
        write_rubric_job(job_of_run(rewards, processes), job.parent)
    train(
        job,
        processes=settings.processes,
        machines=here,
        program=RUBRIC_PROGRAM if rewards.language_models else PPO_PROGRAM,
        stall_minutes=settings.stall_minutes,
        on_metrics=on_metrics,
    )


def _trained_policy(
    made: MadeModel,
    values: _PolicyValues,
    beside: Mapping[str, MadeModel],
    warnings: list[str],
    run: FlowRun,
    epochs: int,
) -> TrainedPolicy:
    first, last = _without_number(values.updates[0]), _without_number(values.updates[-1])
    # A run that reuses the policy of another run pays for no tokens. A run that was killed after
    # its training reuses its own policy when it is resumed, and has paid for it.
    trained = (made, *beside.values())
    paid = any(not each.reused or each.run == run.id for each in trained)
    earlier, critic = beside.get(EARLIER), beside.get(CRITIC)
    sampled = _tokens_sampled(values.updates) if paid else 0
    return TrainedPolicy(
        path=made.place,
        digest=made.digest,
        objective={
            name: Change(first=first[name], last=last[name]) for name in first if name in last
        },
        warnings=warnings,
        episodes_per_second=last["eps"],
        peak_rss_bytes=values.peak_rss_bytes,
        tokens_sampled=sampled,
        tokens_trained=sampled * epochs,
        self_check=values.self_check,
        watched=values.watched,
        rounds=values.rounds or [],
        spent=sum_spent(values.spent or {}, values.rewards_spent or {}) if paid else {},
        earlier=(
            None if earlier is None else EarlierPolicies(path=earlier.place, digest=earlier.digest)
        ),
        critic=(
            None
            if critic is None
            else PreparedModel(path=critic.place, digest=critic.digest, metrics={})
        ),
    )


def _without_number(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != UPDATE}


def _tokens_sampled(updates: list[dict[str, Any]]) -> int:
    """Return the number of response tokens: the sum over updates of mean length x responses."""
    tokens = episodes = 0.0
    for update in updates:
        tokens += update["val/response_length"] * (update["episode"] - episodes)
        episodes = update["episode"]
    return round(tokens)
