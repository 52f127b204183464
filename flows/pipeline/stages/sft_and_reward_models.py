"""Provide the policy and the reward model for PPO: load or train each of them."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.inputs.flow_run import REWARD_MODEL, FlowRun
from pipeline.inputs.labeled_pairs import decided_pairs
from pipeline.inputs.model_digests import digest_of_model
from pipeline.inputs.replayed_pairs import new_and_replayed, read_start_rows, trained_pairs
from pipeline.inputs.run_data import RunData
from pipeline.judges.judge_budget import Spent
from pipeline.judges.judge_names import can_ask
from pipeline.launch.checkpoint_mirror import mirrored
from pipeline.launch.commands import ONE_MACHINE, Machines
from pipeline.launch.launcher import OnMetrics
from pipeline.launch.supervised_training import Training, supervised_job, train_supervised
from pipeline.results.step_records import FreshPairs, PreparedModel
from pipeline.settings.settings import Settings
from pipeline.settings.training_sections import SupervisedSection
from pipeline.stages.fresh_pairs import FRESH_PAIRS, label_samples
from pipeline.stages.tracked import card_of_step, stage, with_files
from pipeline.storage.cached_results import can_be_reused, make_or_reuse, move_files
from pipeline.storage.workspace import original_names
from pipeline.tracking.tracker import Tracker
from ppo_core.data.rows.read_rows import Rows
from ppo_core.errors.out_of_memory import free_unused
from ppo_core.io.folder_cache import digest_of, digest_of_code
from ppo_core.io.imported_modules import imported_modules
from ppo_core.models.files.finite_weights import require_finite_weights
from ppo_core.models.loading import MEMBER, member_folders
from ppo_core.supervised.job import read_result

SFT, FRESH, JUDGE = "sft", "fresh-reward-model", "judge"
"""Names of the trainings besides REWARD_MODEL; the folder of a training in the cache is
NAME-DIGEST."""

MODEL = "model"
"""Subfolder of a training's folder for the trained model, before it is moved into the cache."""

CODE = "ppo_core.supervised.training"
"""Entry module of the trainings. Its code and its imports are part of the cache key."""


@dataclass(frozen=True, kw_only=True)
class _Training:
    """One supervised training of the run."""

    name: str
    model: str
    """Folder or hub id of the model to start from."""

    rows: Rows
    section: SupervisedSection
    data: RunData

    def decides_the_result(self) -> dict[str, Any]:
        """Return everything that the trained model depends on."""
        return {
            "prompt_format": self.data.settings.prompt_format,
            "overlong": self.data.settings.overlong,
            "model": digest_of_model(self.model),
            "rows": self.rows.digest,
            "settings": self.section.settings_of_result(),
            "code": digest_of_code(*imported_modules(CODE)),
        }


@stage("load_policy", patient=True)
def load_policy(
    tracker: Tracker, settings: Settings, run: FlowRun, here: Machines = ONE_MACHINE
) -> tuple[PreparedModel, FreshPairs | None]:
    """Return the policy from which PPO starts, and labeled pairs of its samples.

    The policy is the setting `policy`, or this model fine-tuned on `sft_data`. The pairs are None
    in two cases: the settings ask for no pairs, or the run has one machine, on which
    `load_reward_models` labels the pairs. With several machines, the other machines call
    `load_policy_as_worker` at the same time.
    """
    if settings.sft_data:
        policy = _train_and_log(_policy_training(settings, run), run, here, tracker)
    else:
        policy = _given_model(settings.policy, run)
    if settings.num_nodes == 1 or not settings.fresh_pairs.wanted:
        return policy, None
    return policy, _label_samples(settings, policy, run, tracker)


@with_files("settings", "policy")
def _label_samples(
    settings: Settings, policy: PreparedModel, run: FlowRun, tracker: Tracker
) -> FreshPairs:
    return label_samples(tracker, RunData(settings), policy, run)


@stage("load_reward_model", patient=True)
def load_reward_models(
    tracker: Tracker,
    settings: Settings,
    sft: PreparedModel,
    run: FlowRun,
    here: Machines = ONE_MACHINE,
    fresh: FreshPairs | None = None,
) -> tuple[PreparedModel, PreparedModel | None, FreshPairs | None]:
    """Return the reward model, the trained judge, and labeled pairs of samples of `sft`.

    The reward model is the setting `reward_model`, or a model that this step trains.

    If the settings ask for pairs of the policy's samples, `label_samples` labels them, unless this
    reward model already agrees with the judge. With several machines, `fresh` has the pairs that
    `load_policy` labeled. A second reward model is trained on the pairs, and one of the two models
    is returned, see `better_reward_model`. Without labeled pairs, the returned pairs are None.

    The judge is trained from `sft`, on other pairs and with another seed. It is None if the
    settings name a judge.

    With several machines, the other machines call `load_reward_models_as_worker` at the same time.
    """
    if settings.reward_model:
        reward_model = _given_model(settings.reward_model, run)
    else:
        reward_model = _train_members(_reward_training(settings, sft, run), run, here, tracker)
    if settings.num_nodes == 1 and settings.fresh_pairs.wanted:
        gains_little, spent = _measure_given(settings, sft, reward_model, run, tracker)
        reward_model = replace(reward_model, spent=spent)
        fresh = None if gains_little else _label_samples(settings, sft, run, tracker)
    if fresh:
        trained = train_fresh_model(settings, sft, [fresh], run, tracker, here)
        better = better_reward_model(settings, reward_model, trained, fresh, run, tracker)
        reward_model = replace(better, spent=reward_model.spent)
    if settings.judge:
        return reward_model, None, fresh
    judge, _ = _train_once(_judge_training(settings, sft, run), run, here, tracker)
    _log_result(tracker, f"{JUDGE}-training", judge.metrics)
    return reward_model, judge, fresh


@with_files("settings", "sft", "given")
def _measure_given(
    settings: Settings, sft: PreparedModel, given: PreparedModel, run: FlowRun, tracker: Tracker
) -> tuple[bool, dict[str, Spent]]:
    """Return whether labels would gain little, because judge and given model already agree.

    Also return what the judge spent. The judge is not asked if labels exist already, if there are
    several rounds, or if `enough_agreement` is 1. A judge that the run trains is not asked either:
    it has learned from the given pairs, so its agreement would prove nothing.
    """
    # Imported here, because most runs ask for no labels, and the import is slow.
    from pipeline.stages.validation import measure_given_model

    fresh = settings.fresh_pairs
    is_needless = fresh.labels or fresh.rounds > 1 or fresh.enough_agreement == 1
    if is_needless or not settings.judge or not can_ask(settings.judge):
        return False, {}
    found, spent = measure_given_model(RunData(settings), sft, given, run.folder)
    free_unused()
    if found is None or found.accuracy is None:
        return False, spent
    rate = found.accuracy
    gains_little = rate.low > fresh.enough_agreement
    tracker.parent.log_figures({f"{REWARD_MODEL}/agreement_with_judge": rate.accuracy})
    tracker.step.set_tags({"labels_would_gain_little": str(gains_little)})
    follows = (
        "labels would gain little, and no pairs are labeled. To label pairs anyway, set "
        "fresh_pairs.enough_agreement=1"
        if gains_little
        else "pairs are labeled"
    )
    print(
        f"{FRESH_PAIRS}: {original_names(given.path)} orders {rate.accuracy:.1%} of {rate.n} "
        f"decided pairs of the policy's samples as the judge does, 95 % interval {rate.low:.1%} .. "
        f"{rate.high:.1%}. The limit is fresh_pairs.enough_agreement="
        f"{fresh.enough_agreement:g}, so {follows}.",
        flush=True,
    )
    return gains_little, spent


def load_policy_as_worker(settings: Settings, run: FlowRun, here: Machines) -> None:
    """Run this machine's processes of `load_policy`; called on all machines except the first."""
    if settings.sft_data:
        _take_part(_policy_training(settings, run), run, here)


def load_reward_models_as_worker(
    settings: Settings,
    sft: PreparedModel,
    run: FlowRun,
    here: Machines,
    fresh: FreshPairs | None = None,
) -> None:
    """Run this machine's processes of `load_reward_models`, on all machines except the first."""
    if not settings.reward_model:
        _take_part_in_members(_reward_training(settings, sft, run), run, here)
    if fresh:
        _take_part_in_members(_fresh_training(settings, sft, [fresh], run), run, here)
    if not settings.judge:
        _take_part(_judge_training(settings, sft, run), run, here)


def _policy_training(settings: Settings, run: FlowRun) -> _Training:
    policy = run.workspace.fetch(settings.policy)
    # `fetch` includes the weights of the policy, which `fetch_files` leaves out.
    data = RunData(replace(run.workspace.fetch_files(settings), policy=policy))
    return _Training(name=SFT, model=policy, rows=data.sft_rows(), section=settings.sft, data=data)


@with_files("settings", "sft")
def _reward_training(settings: Settings, sft: PreparedModel, run: FlowRun) -> _Training:
    data, section = RunData(settings), settings.reward_model_training
    rows, model = data.reward_training_pairs(), sft.path
    if run.start is not None:
        start = run.workspace.fetch_files(run.start).path
        model = str(Path(start) / REWARD_MODEL)
        rows = new_and_replayed(rows, trained_pairs(read_start_rows(start)), settings.seed)
    return _Training(name=REWARD_MODEL, model=model, rows=rows, section=section, data=data)


@with_files("settings", "sft")
def _fresh_training(
    settings: Settings, sft: PreparedModel, pairs: Sequence[FreshPairs], run: FlowRun
) -> _Training:
    data, section = RunData(settings), settings.reward_model_training
    rows = data.fresh_training_pairs([run.workspace.fetch_files(each).path for each in pairs])
    return _Training(name=FRESH, model=sft.path, rows=rows, section=section, data=data)


def train_fresh_model(
    settings: Settings,
    sft: PreparedModel,
    pairs: Sequence[FreshPairs],
    run: FlowRun,
    tracker: Tracker,
    here: Machines = ONE_MACHINE,
) -> PreparedModel:
    """Return the reward model that is trained on the pairs of all rounds so far."""
    return _train_members(_fresh_training(settings, sft, pairs, run), run, here, tracker)


@with_files("settings", "given", "trained", "fresh")
def better_reward_model(
    settings: Settings,
    given: PreparedModel,
    trained: PreparedModel,
    fresh: FreshPairs,
    run: FlowRun,
    tracker: Tracker,
    names: tuple[str, str] = (REWARD_MODEL, FRESH),
) -> PreparedModel:
    """Return `trained`, unless `given` is better on held-out pairs of the policy's samples.

    `trained` was trained on the pairs that are not held out, so it is probably better. `given` is
    returned only if it is ahead by more than one standard error, see `is_ahead`. `names` are the
    names of both models in metrics and messages.
    """
    # Imported here, because most runs compare no reward models and statsmodels imports slowly.
    from pipeline.evaluation.pair_accuracy import groups_of, hits, is_ahead
    from pipeline.reward_validation.accuracy import measure_accuracy, scores_of_model

    data = RunData(settings)
    pairs = decided_pairs(data.fitting_held_out_pairs(fresh.path), [])
    right = []
    for name, model, prompt_format in (
        (names[0], given, data.reward_format),
        (names[1], trained, settings.prompt_format),
    ):
        chosen, rejected = scores_of_model(
            model.path,
            pairs,
            end_of_text=settings.reward_model_training.end_of_text,
            prompt_format=prompt_format,
        )
        rate = measure_accuracy(chosen, rejected, pairs)
        print(
            f"{name}: right in {rate.accuracy:.1%} of {rate.n} held-out pairs of the policy's "
            f"samples, 95 % interval {rate.low:.1%} .. {rate.high:.1%}",
            flush=True,
        )
        tracker.parent.log_figures({f"{name}/on_policy_accuracy": rate.accuracy})
        right.append(hits(chosen - rejected))
    better = given if is_ahead(right[0], right[1], groups_of(pairs)) else trained
    print(f"reward model: PPO trains against {original_names(better.path)}", flush=True)
    return better


@with_files("settings", "sft")
def _judge_training(settings: Settings, sft: PreparedModel, run: FlowRun) -> _Training:
    data, section = RunData(settings), settings.reward_model_training
    section = replace(section, seed=(section.seed + 1) % 2**32)
    rows = data.judge_pairs()
    return _Training(name=JUDGE, model=sft.path, rows=rows, section=section, data=data)


def _train_once(
    training: _Training, run: FlowRun, here: Machines, tracker: Tracker
) -> tuple[PreparedModel, bool]:
    """Return the trained model, and whether it was in the cache."""
    name, job = training.name, run.folder / training.name

    # The name judge/accuracy is taken: it is the trained judge's accuracy on held-out pairs.
    curves = f"{JUDGE}-training" if name == JUDGE else name

    def log_curves(step: int, metrics: Mapping[str, float]) -> None:
        tracker.parent.log_metrics(
            {f"{curves}/{metric}": value for metric, value in metrics.items()}, step=step
        )

    def train(folder: Path) -> Mapping[str, float]:
        print(f"{name}: training on {len(training.rows):,} rows", flush=True)
        with _shown(training, run, tracker):
            _train(training, run, here, log_curves)
        move_files(job / MODEL, folder)
        return read_result(job)

    made = make_or_reuse(run.workspace, name, training.decides_the_result(), train)
    if made.reused:
        card_of_step().say(f"{name}: an earlier run has trained this model.")
    # Remove the checkpoints of the training; each is larger than the model.
    shutil.rmtree(job, ignore_errors=True)
    model = PreparedModel(path=made.place, digest=made.digest, metrics=made.values)
    return model, made.reused


def _shown(training: _Training, run: FlowRun, tracker: Tracker) -> AbstractContextManager[None]:
    """Show a training live in the context, except in `train_policy`, which already shows PPO."""
    if tracker.name == "train_policy":
        return nullcontext()
    # Imported here, because a step that reuses its models does not need it.
    from pipeline.reports.live.live_view import LiveView

    return LiveView(run, training.data.settings, tracker, card_of_step()).watching()


def _members(training: _Training) -> list[_Training]:
    """Return the trainings of the members of a reward model.

    If the model to start from has members, each new member starts from the old member with the same
    number. Otherwise all members start from the same model.
    """
    section = training.data.settings.reward_model_training
    starts = [*map(str, member_folders(training.model))] or [training.model] * section.members
    first = replace(training, model=starts[0])
    return [first] + [
        replace(
            training,
            name=f"{training.name}-{number}",
            section=section.of_member(number),
            model=starts[number - 1],
        )
        for number in range(2, section.members + 1)
    ]


def _train_members(
    training: _Training, run: FlowRun, here: Machines, tracker: Tracker
) -> PreparedModel:
    """Return the reward model, or a folder with its members; each member is trained once."""
    trainings = _members(training)
    if len(trainings) == 1:
        return _train_and_log(training, run, here, tracker)
    trained = [_train_once(one, run, here, tracker) for one in trainings]
    models = [model for model, _ in trained]

    def join(folder: Path) -> Mapping[str, float]:
        for number, model in enumerate(models, start=1):
            shutil.copytree(run.workspace.fetch_files(model).path, folder / f"{MEMBER}{number}")
        return {name: fmean(model.metrics[name] for model in models) for name in models[0].metrics}

    inputs = {"members": [model.digest for model in models]}
    made = make_or_reuse(run.workspace, training.name, inputs, join)
    _log_result(tracker, training.name, made.values)
    tracker.step.set_tags({"reused": str(all(reused for _, reused in trained))})
    return PreparedModel(path=made.place, digest=made.digest, metrics=made.values)


def _take_part_in_members(training: _Training, run: FlowRun, here: Machines) -> None:
    for one in _members(training):
        _take_part(one, run, here)


def _take_part(training: _Training, run: FlowRun, here: Machines) -> None:
    """Run this machine's processes of a training, unless its model is in the cache."""
    if not can_be_reused(run.workspace, training.name, training.decides_the_result()):
        _train(training, run, here, lambda step, metrics: None)


def _train(training: _Training, run: FlowRun, here: Machines, on_metrics: OnMetrics) -> None:
    folder, rows, is_sft = run.folder / training.name, training.rows, training.name == SFT
    settings = training.data.settings
    kind: Training = "sft" if is_sft else "reward"
    job = supervised_job(kind, training.model, training.section, settings, folder / MODEL)
    if run.workspace.store:
        # Put the encoded rows on this disk, because the training processes cannot fetch from S3.
        training.data.encoded("demonstrations" if is_sft else "pairs", rows, training.section)
    with mirrored(run.workspace, folder, here, training=digest_of(training.decides_the_result())):
        train_supervised(job, rows, settings, folder=folder, machines=here, on_metrics=on_metrics)


def _train_and_log(
    training: _Training, run: FlowRun, here: Machines, tracker: Tracker
) -> PreparedModel:
    model, reused = _train_once(training, run, here, tracker)
    _log_result(tracker, training.name, model.metrics)
    tracker.step.set_tags({"reused": str(reused)})
    return model


def _log_result(tracker: Tracker, training: str, values: Mapping[str, float]) -> None:
    """Log what a training returned, such as its mean loss at the end."""
    tracker.parent.log_figures({f"{training}/{name}": value for name, value in values.items()})


def _given_model(place: str, run: FlowRun) -> PreparedModel:
    folder = run.workspace.fetch(place)
    if folder != place:
        # The model may come from the hub; then the first step did not check its weights.
        require_finite_weights(folder)
    digest = digest_of_model(folder)
    return PreparedModel(path=place, digest=digest, metrics={})
