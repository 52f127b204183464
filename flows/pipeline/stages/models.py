"""Provide the policy and the reward model for PPO: load or train each of them.

torch is imported only for training, not if the cache has the trained model.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import ppo_core
from pipeline.inputs import data_sets, model_digests
from pipeline.inputs.flow_run import FlowRun
from pipeline.results import PreparedModel
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import cache_folder, track
from pipeline.tracking.tracker import Tracker
from ppo_core.data import folder_cache
from ppo_core.data.rows.reader import Rows
from ppo_core.distributed.process import large_imports
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.supervised.training_code import modules_of_training

Trainer = Callable[..., Mapping[str, float]]


def load_policy(settings: Settings, run: FlowRun) -> PreparedModel:
    """Return the policy to start from: `policy` itself, or `policy` fine-tuned on `sft_data`."""
    with track(run, "load_policy", patient=True) as tracker:
        if not settings.sft_data:
            return PreparedModel(path=settings.policy, metrics={})
        rows = data_sets.sft_rows(settings)
        folder = cache_folder(settings)
        made = _train_once(
            "train_sft", folder / "sft", settings.policy, rows, settings.sft, settings
        )
        return _prepared(made, tracker)


def load_reward_models(
    settings: Settings, sft: PreparedModel, run: FlowRun
) -> tuple[PreparedModel, PreparedModel | None]:
    """Return the reward model, and the one that judges if no judge is named; None if one is.

    The reward model is `reward_model` itself, or one trained from the policy. The judge is trained
    from the same policy, on other pairs and with another seed.
    """
    with track(run, "load_reward_model", patient=True) as tracker:
        folder, config = cache_folder(settings), settings.reward_model_training
        reward_model = PreparedModel(path=settings.reward_model, metrics={})
        if not settings.reward_model:
            rows = data_sets.training_pairs(settings)
            made = _train_once(
                "train_reward_model", folder / "reward-model", sft.path, rows, config, settings
            )
            reward_model = _prepared(made, tracker)
        if settings.judge:
            return reward_model, None
        rows = data_sets.judge_pairs(settings)
        config = replace(config, seed=(config.seed + 1) % 2**32)
        made = _train_once("train_reward_model", folder / "judge", sft.path, rows, config, settings)
        tracker.step.log_metrics({f"judge/{name}": value for name, value in made.values.items()})
        return reward_model, PreparedModel(path=str(made.path), metrics=made.values)


def _train_once(
    trainer: str,
    prefix: Path,
    model: str,
    rows: Rows,
    config: SupervisedConfig,
    settings: Settings,
) -> folder_cache.Cached:
    """Return the cached model in `prefix`-DIGEST; train it with `ppo_core` if it is missing."""

    def train(folder: Path) -> Mapping[str, float]:
        print(f"{prefix.name}: training on {len(rows):,} rows", flush=True)
        with large_imports():
            call: Trainer = getattr(ppo_core, trainer)
        return call(model, rows, config, folder, **reading)

    reading = {"prompt_format": settings.prompt_format, "overlong": settings.overlong}
    decides_the_result = {
        **reading,
        "model": model_digests.digest_of_model(model),
        "rows": rows.digest,
        "settings": asdict(config),
        "code": folder_cache.digest_of_code(*modules_of_training()),
    }
    made = folder_cache.make_once(prefix.parent, prefix.name, decides_the_result, train)
    print(f"{prefix.name}: {'reused' if made.reused else 'made'} {made.path}", flush=True)
    return made


def _prepared(made: folder_cache.Cached, tracker: Tracker) -> PreparedModel:
    tracker.step.log_metrics(made.values)
    tracker.step.set_tags({"reused": str(made.reused)})
    return PreparedModel(path=str(made.path), metrics=made.values)
