"""Use tasks of lm-evaluation-harness as guards: score the policies on the same documents."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.evaluation.guards.compare import compare_scores
from pipeline.inputs.model_digests import digest_of_model
from pipeline.results.evaluation import TASK_SOURCE, GuardResult
from pipeline.settings.gate_configs import GuardsConfig, is_task_file, name_of_task
from pipeline.settings.settings import Settings
from ppo_core.config.placement import placement_for_reading
from ppo_core.config.spelling import nearest_name
from ppo_core.errors import ConfigError, DataError, library_errors
from ppo_core.errors.out_of_memory import BatchSize, free_unused
from ppo_core.errors.packages import require_package
from ppo_core.io.folder_cache import digest_of_file, make_once
from ppo_core.io.validation import read_record
from ppo_core.models.loading import load_policy, load_tokenizer


class TaskScore(NamedTuple):
    """Score of a policy on one document of a task."""

    policy: str
    """`ppo`, `sft` or `champion`."""

    task: str
    """Name of the guard."""

    document: str
    """Digest of the document."""

    score: float
    """Score between 0 and 1 by the first metric of the task."""


@dataclass(frozen=True)
class _Scores:
    """What the cache stores about a policy: its scores on all tasks."""

    scores: list[TaskScore]


class PolicyFiles(NamedTuple):
    """Folders or hub ids of a policy and of its tokenizer."""

    model: str
    tokenizer: str


def load_tasks(config: GuardsConfig) -> dict[str, Any]:
    """Return the tasks of the settings, with their data sets, by name of the guard.

    Raises:
        ConfigError: the package is not installed; a task is unknown, is a group of tasks, or cannot
            be loaded; or lower values of its first metric are better.
    """
    require_package("lm_eval", extra="lm-eval", needed_by="promotion.guards.tasks")
    from lm_eval.tasks import TaskManager

    # Reading the package's list of tasks takes half a minute, and a task file needs no list.
    manager = TaskManager(include_defaults=not all(map(is_task_file, config.tasks)))
    with _no_downloaded_metrics():
        return {name_of_task(source): _load(source, manager) for source in config.tasks}


def _load(source: str, manager: Any) -> Any:
    setting = f"promotion.guards.tasks.{source}"
    if is_task_file(source):
        if not Path(source).is_file():
            raise ConfigError(f"{setting}: there is no such file. Correct the path.")
    elif source in {*manager.all_groups, *manager.all_tags}:
        raise ConfigError(f"{setting} is a group of tasks. Name single tasks of this group.")
    elif source not in manager.all_subtasks:
        near = nearest_name(source, manager.all_subtasks)
        hint = f" Did you mean {near}?" if near else ""
        raise ConfigError(
            f"{setting}: lm_eval {version('lm_eval')} has no such task.{hint} Name a task of this "
            "version, or the path of a task file that ends in .yaml."
        )
    with library_errors(
        ConfigError,
        f"{setting} cannot be loaded",
        "Without network, its data set must be in the cache of this machine. Code of data sets and "
        "metrics from the hub is not run.",
    ):
        loaded = manager.load([source])
        if loaded["groups"] or len(loaded["tasks"]) != 1:
            raise ConfigError(f"{setting} is a group of tasks. Name a file with a single task.")
        (task,) = loaded["tasks"].values()
        metric = _metric_of(task)
        if not task.higher_is_better().get(metric, True):
            raise ConfigError(
                f"{setting}: its first metric, {metric}, is better if lower, but a guard compares "
                "scores that are better if higher. Choose another task."
            )
    return task


def _metric_of(task: Any) -> str:
    return str(next(iter(task.aggregation())))


@contextmanager
def _no_downloaded_metrics() -> Iterator[None]:
    """Prevent the package `evaluate` from downloading and running code of metrics."""
    from evaluate import config

    before, config.HF_EVALUATE_OFFLINE = config.HF_EVALUATE_OFFLINE, True
    try:
        yield
    finally:
        config.HF_EVALUATE_OFFLINE = before


def score_by_task(
    name: str,
    task: Any,
    model_of: Callable[[int], Any],
    *,
    size: int,
    limit: int,
    seed: int,
) -> list[tuple[str, float]]:
    """Return digest and score of each document of a task, by its first metric and first filter.

    Args:
        name: name of the guard.
        task: the task, as `load_tasks` returns it.
        model_of: function of a batch size that returns a model of lm_eval, or the name of a model.
        size: first batch size to try; it is reduced if the memory is full.
        limit: maximum number of documents; the first ones are used.
        seed: seed of the few-shot examples, and of other random choices of the task.

    Raises:
        DataError: the task cannot be run, or a score is not a number in [0, 1].
        TrainingError: the memory is too small for one document.
    """
    from lm_eval import simple_evaluate

    def evaluate(size: int) -> Any:
        return simple_evaluate(
            model=model_of(size),
            tasks=[task],
            limit=limit,
            bootstrap_iters=0,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )

    with (
        _no_downloaded_metrics(),
        library_errors(DataError, f"The task {name} cannot be run", "Choose another task."),
    ):
        found = BatchSize(size, "scoring a task").run(evaluate)
    (samples,) = found["samples"].values()
    metric, first = _metric_of(task), samples[0]["filter"]
    chosen = sorted(
        (one for one in samples if one["filter"] == first), key=lambda one: one["doc_id"]
    )
    return [(one["doc_hash"], _score(name, metric, one.get(metric))) for one in chosen]


def _score(name: str, metric: str, given: object) -> float:
    if isinstance(given, bool | int | float | np.number | np.bool_):
        score = float(given)
        if isfinite(score) and 0 <= score <= 1:
            return score
    raise DataError(
        f"The task {name} gives {given!r:.80} for a document by its first metric, {metric}, and "
        "the guard needs a number in [0, 1]. Choose another task, such as one with acc or "
        "exact_match."
    )


def compare_on_tasks(
    settings: Settings,
    policies: Mapping[str, PolicyFiles],
    earlier: Iterable[TaskScore],
    rival: str,
    folder: Path,
) -> tuple[dict[str, GuardResult], list[TaskScore]]:
    """Compare `ppo` with its rival on every task of the settings.

    Args:
        settings: settings of the run.
        policies: the policies to score, by name.
        earlier: scores of other policies on the same tasks.
        rival: the policy that `ppo` must beat.
        folder: folder of the evaluation. The scores of each policy are stored there, so a repeated
            step does not score a policy again.

    Returns:
        The results by guard, and all scores.

    Raises:
        ConfigError: see `load_tasks`.
        DataError: see `score_by_task`; or the documents changed between two policies.
        ModelError: a policy cannot be loaded.
    """
    config = settings.promotion.guards
    tasks, scores = load_tasks(config), list(earlier)
    for who, files in policies.items():
        scores += _scores_of_policy(settings, tasks, who, files, folder)
    results = {}
    for source in config.tasks:
        name = name_of_task(source)
        own, other = (_only(scores, who, name) for who in ("ppo", rival))
        documents = [one.document for one in own]
        if documents != [one.document for one in other]:
            raise DataError(
                f"The documents of the task {name} changed between the policies, so their scores "
                "cannot be compared. Keep its data set unchanged, and run again."
            )
        results[name] = compare_scores(
            documents,
            np.array([one.score for one in own]),
            np.array([one.score for one in other]),
            margin=config.margin_of(name),
            source=f"{TASK_SOURCE} {version('lm_eval')}, {_metric_of(tasks[name])} of {source}",
        )
    return results, scores


def _only(scores: Sequence[TaskScore], who: str, task: str) -> list[TaskScore]:
    return [one for one in scores if (one.policy, one.task) == (who, task)]


def _scores_of_policy(
    settings: Settings, tasks: Mapping[str, Any], who: str, files: PolicyFiles, folder: Path
) -> list[TaskScore]:
    limits = settings.promotion.guards.tasks
    inputs = {
        "model": digest_of_model(files.model),
        "tokenizer": digest_of_model(files.tokenizer),
        "tasks": limits,
        "files": [digest_of_file(Path(one)) for one in limits if is_task_file(one)],
        "sampling": [settings.seed, settings.precision],
        "lm_eval": version("lm_eval"),
    }

    def measure(unfinished: Path) -> dict[str, Any]:
        scores = _measure(settings, tasks, who, files)
        # Free the memory of this model for the next model.
        free_unused()
        return asdict(_Scores(scores))

    made = make_once(folder, f"tasks-{who}", inputs, measure)
    return read_record(made.values, _Scores).scores


def _measure(
    settings: Settings, tasks: Mapping[str, Any], who: str, files: PolicyFiles
) -> list[TaskScore]:
    """Load a policy as for sampling answers, and score it on all tasks."""
    from lm_eval.models.huggingface import HFLM

    model = load_policy(files.model, placement=placement_for_reading(settings.precision))
    tokenizer = load_tokenizer(files.tokenizer)

    def model_of(size: int) -> Any:
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size)

    scores = []
    for source, limit in settings.promotion.guards.tasks.items():
        name = name_of_task(source)
        print(f"promotion.guards.tasks.{source}: scoring {who}", flush=True)
        found = score_by_task(
            name,
            tasks[name],
            model_of,
            size=settings.ppo.local_rollout_forward_batch_size,
            limit=limit,
            seed=settings.seed,
        )
        scores += [TaskScore(who, name, *one) for one in found]
    return scores
