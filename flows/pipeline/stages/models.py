"""Provide the policy and the reward model for PPO: load or train each of them."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.inputs import data_sets, model_digests
from pipeline.inputs.flow_run import FlowRun
from pipeline.launch.supervised_training import train_supervised
from pipeline.results import PreparedModel
from pipeline.settings.settings import Settings
from pipeline.settings.training_sections import SupervisedSection
from pipeline.stages.tracked import cache_folder, track
from pipeline.tracking.tracker import Tracker
from ppo_core.data import folder_cache
from ppo_core.data.rows.reader import Rows
from ppo_core.supervised.training_code import modules_of_training


def load_policy(settings: Settings, run: FlowRun) -> PreparedModel:
    """Return the policy to start from: `policy` itself, or `policy` fine-tuned on `sft_data`."""
    with track(run, "load_policy", patient=True) as tracker:
        if not settings.sft_data:
            return PreparedModel(path=settings.policy, metrics={})
        rows = data_sets.sft_rows(settings)
        made = _train_once("sft", settings.policy, rows, settings.sft, settings, run, tracker)
        return _prepared(made, tracker)


def load_reward_models(
    settings: Settings, sft: PreparedModel, run: FlowRun
) -> tuple[PreparedModel, PreparedModel | None]:
    """Return the reward model, and the one that judges if no judge is named; None if one is.

    The reward model is `reward_model` itself, or one trained from the policy. The judge is trained
    from the same policy, on other pairs and with another seed.
    """
    with track(run, "load_reward_model", patient=True) as tracker:
        section = settings.reward_model_training
        reward_model = PreparedModel(path=settings.reward_model, metrics={})
        if not settings.reward_model:
            rows = data_sets.training_pairs(settings)
            made = _train_once("reward-model", sft.path, rows, section, settings, run, tracker)
            reward_model = _prepared(made, tracker)
        if settings.judge:
            return reward_model, None
        rows = data_sets.judge_pairs(settings)
        section = replace(section, seed=(section.seed + 1) % 2**32)
        made = _train_once("judge", sft.path, rows, section, settings, run, tracker)
        # MLflow has the curve of the training as judge/loss.
        tracker.step.log_metrics({f"judge_{name}": value for name, value in made.values.items()})
        return reward_model, PreparedModel(path=str(made.path), metrics=made.values)


def _train_once(
    name: str,
    model: str,
    rows: Rows,
    section: SupervisedSection,
    settings: Settings,
    run: FlowRun,
    tracker: Tracker,
) -> folder_cache.Cached:
    """Return the model NAME-DIGEST of the cache; train it if it is missing."""
    job = run.folder / name

    def log_curves(step: int, metrics: Mapping[str, float]) -> None:
        tracker.step.log_metrics(
            {f"{name}/{metric}": value for metric, value in metrics.items()}, step=step
        )

    def train(folder: Path) -> Mapping[str, float]:
        print(f"{name}: training on {len(rows):,} rows", flush=True)
        return train_supervised(
            "sft" if name == "sft" else "reward",
            model,
            rows,
            section,
            settings,
            folder=job,
            model_dir=folder,
            on_metrics=log_curves,
        )

    decides_the_result = {
        "prompt_format": settings.prompt_format,
        "overlong": settings.overlong,
        "model": model_digests.digest_of_model(model),
        "rows": rows.digest,
        "settings": section.settings_of_result(),
        "code": folder_cache.digest_of_code(*modules_of_training()),
    }
    made = folder_cache.make_once(cache_folder(settings), name, decides_the_result, train)
    # Its checkpoints, each larger than the model, have served their purpose.
    shutil.rmtree(job, ignore_errors=True)
    print(f"{name}: {'reused' if made.reused else 'made'} {made.path}", flush=True)
    return made


def _prepared(made: folder_cache.Cached, tracker: Tracker) -> PreparedModel:
    tracker.step.log_metrics(made.values)
    tracker.step.set_tags({"reused": str(made.reused)})
    return PreparedModel(path=str(made.path), metrics=made.values)
