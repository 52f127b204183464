"""The stages of the flow: settings and paths in, paths and small numbers out.

Each stage imports what it needs when it runs: the flow is also parsed where nothing but
Metaflow is installed, and by the scheduler, which would wait for torch.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.settings import Settings

Result = dict[str, Any]
"""What a stage hands on: paths as text, and small numbers."""


def read_settings(from_file: Mapping[str, Any], from_command_line: Mapping[str, Any]) -> Settings:
    """Read the settings strictly and refuse every input that would fail later."""
    from pipeline.inputs import check_inputs, require_writable
    from pipeline.registry import check_registry
    from pipeline.settings import make_settings

    settings = make_settings(from_file, from_command_line)
    require_writable(Path(settings.output_dir), "output_dir")
    if settings.task:
        settings = _make_demo_task(settings)
    check_inputs(settings)
    check_registry(settings.registered_model)
    return settings


def load_policy(settings: Settings) -> Result:
    """The policy to start from: as it is, or fine-tuned on `sft_data`."""
    from pipeline import cache, inputs
    from ppo_core.supervised.training import train_sft

    if not settings.sft_data:
        return {"path": settings.policy, "metrics": {}}
    rows = inputs.sft_rows(settings)
    made = cache.make_once(
        _cache_folder(settings),
        "sft",
        {
            "model": _digest_of_model(settings.policy),
            "rows": rows.digest,
            "settings": asdict(settings.sft),
            "code": cache.digest_of_code(*_supervised_code()),
        },
        lambda folder: train_sft(settings.policy, rows.usable, settings.sft, folder),
    )
    return {"path": str(made.path), "metrics": made.metrics}


def load_reward_model(settings: Settings, sft: Result) -> Result:
    """The reward model: the one that is named, or one trained from the policy."""
    from pipeline import cache, inputs
    from ppo_core.supervised.training import train_reward_model

    if settings.reward_model:
        return {"path": settings.reward_model, "metrics": {}}
    rows = inputs.training_pairs(settings)
    training = settings.reward_model_training
    made = cache.make_once(
        _cache_folder(settings),
        "reward-model",
        {
            "model": _digest_of_model(sft["path"]),
            "rows": rows.digest,
            "settings": asdict(training),
            "code": cache.digest_of_code(*_supervised_code()),
        },
        lambda folder: train_reward_model(sft["path"], rows.usable, training, folder),
    )
    return {"path": str(made.path), "metrics": made.metrics}


def validate_reward_model(settings: Settings, reward_model: Result) -> Result:
    """The reward model's accuracy on held-out pairs, and the bias that centres its scores."""
    from pipeline import inputs
    from pipeline.reward_validation import mean_reference_score, measure_accuracy
    from ppo_core.loading import load_reward_model

    model = load_reward_model(
        reward_model["path"], end_of_text=settings.reward_model_training.end_of_text
    )
    accuracy = measure_accuracy(model, inputs.test_pairs(settings).usable)
    bias = mean_reference_score(model, inputs.training_prompts(settings))
    return {**asdict(accuracy), "bias": bias}


def train_policy(
    settings: Settings, sft: Result, reward_model: Result, validation: Result, run_id: str
) -> Result:
    """Train the policy with PPO against the reward model."""
    from pipeline import inputs
    from pipeline.metrics_file import MetricsFile
    from ppo_core.loading import load_policy, load_reward_model, load_tokenizer
    from ppo_core.trainer import PPOTrainer

    folder = _run_folder(settings, run_id)
    trainer = PPOTrainer(
        args=replace(settings.ppo, output_dir=str(folder / "ppo")),
        processing_class=load_tokenizer(sft["path"]),
        model=load_policy(sft["path"]),
        ref_model=load_policy(sft["path"]),
        reward_model=load_reward_model(
            reward_model["path"],
            bias=validation["bias"],
            end_of_text=settings.reward_model_training.end_of_text,
        ),
        train_dataset=inputs.training_prompts(settings).column("prompt"),
        callbacks=[MetricsFile(folder / "metrics.jsonl")],
    )
    started = time.perf_counter()
    updates = trainer.train()
    seconds = time.perf_counter() - started
    trainer.save_model(folder / "policy")
    return {
        "path": str(folder / "policy"),
        "updates": str(folder / "metrics.jsonl"),
        "objective": {
            name: {"first": updates[0][name], "last": updates[-1][name]} for name in updates[0]
        },
        "episodes_per_second": updates[-1]["episode"] / seconds,
        "peak_rss_bytes": _peak_rss_bytes(),
    }


def evaluate_win_rate(settings: Settings, sft: Result, policy: Result, run_id: str) -> Result:
    """Judge the answers of both policies against the references and against each other."""
    from pipeline import inputs
    from pipeline.data import write_jsonl
    from pipeline.evaluation import answer, distinct_share
    from pipeline.judges import make_judge
    from pipeline.win_rate import measure_win_rate

    rows = inputs.evaluation_prompts(settings)
    prompts = [row["prompt"] for row in rows]
    answers = {
        "sft": answer(sft["path"], sft["path"], prompts, settings),
        "ppo": answer(policy["path"], sft["path"], prompts, settings),
    }
    texts = {"reference": [row["reference"] for row in rows]}
    texts |= {who: given.texts for who, given in answers.items()}
    samples = _run_folder(settings, run_id) / "samples.jsonl"
    write_jsonl(
        samples,
        [
            {"prompt": prompt, **{who: texts[who][i] for who in texts}}
            for i, prompt in enumerate(prompts)
        ],
    )
    judge = make_judge(settings.judge, end_of_text=settings.reward_model_training.end_of_text)
    win_rates = {
        f"{candidate}_vs_{opponent}": asdict(
            measure_win_rate(
                judge,
                settings.judge,
                prompts,
                texts[candidate],
                texts[opponent],
                max_invalid=settings.evaluation.max_invalid,
            )
        )
        for candidate, opponent in (("sft", "reference"), ("ppo", "reference"), ("ppo", "sft"))
    }
    return {
        "win_rate": win_rates,
        "kl": {who: given.kl for who, given in answers.items()},
        "distinct": {who: distinct_share(given.texts) for who, given in answers.items()},
        "samples": str(samples),
    }


def register(
    settings: Settings, validation: Result, policy: Result, evaluation: Result, run_id: str
) -> Result:
    """Register the policy in MLflow with the run's settings, metrics and samples."""
    from pipeline.registry import register_policy
    from pipeline.settings import as_plain_dict

    return register_policy(
        Path(policy["path"]),
        settings.registered_model,
        run_name=run_id,
        settings=as_plain_dict(settings),
        updates=_read_jsonl(policy["updates"]),
        results={
            "win_rate": evaluation["win_rate"],
            "kl": evaluation["kl"],
            "distinct": evaluation["distinct"],
            "reward_model": validation,
            "episodes_per_second": policy["episodes_per_second"],
            "peak_rss_bytes": policy["peak_rss_bytes"],
        },
        samples=_read_jsonl(evaluation["samples"])[: settings.evaluation.num_samples],
    )


def summarize(
    settings: Settings,
    validation: Result,
    policy: Result,
    evaluation: Result,
    model: Result,
    seconds: Mapping[str, float],
) -> Result:
    """The whole run as one plain dict: shown, written and kept beside the version."""
    from pipeline.registry import log_summary
    from pipeline.report import render_summary
    from pipeline.settings import as_plain_dict

    summary = {
        "win_rate": evaluation["win_rate"],
        "kl": evaluation["kl"],
        "distinct": evaluation["distinct"],
        "reward_model": validation,
        "objective": policy["objective"],
        "timings": {
            "seconds": dict(seconds),
            "episodes_per_second": policy["episodes_per_second"],
            "peak_rss_bytes": policy["peak_rss_bytes"],
        },
        "model": model,
        "settings": as_plain_dict(settings),
    }
    log_summary(model["run_id"], summary)
    if settings.summary_json:
        Path(settings.summary_json).write_text(json.dumps(summary, indent=2), encoding="utf-8")
    print(render_summary(summary), flush=True)
    return summary


def _make_demo_task(settings: Settings) -> Settings:
    """The same settings with the files of the built-in task as inputs."""
    from pipeline import cache, demo_judge, demo_posts, demo_task

    made = cache.make_once(
        _cache_folder(settings),
        "tldr",
        {"seed": settings.seed, "code": cache.digest_of_code(demo_posts, demo_judge, demo_task)},
        lambda folder: demo_task.build_demo_task(folder, settings.seed),
    )
    return replace(
        settings,
        task="",
        policy=str(made.path / "base"),
        sft_data=str(made.path / "sft.jsonl"),
        preferences=str(made.path / "preferences-train.jsonl"),
        preferences_test=str(made.path / "preferences-test.jsonl"),
        prompts=str(made.path / "prompts-train.jsonl"),
        eval_prompts=str(made.path / "prompts-eval.jsonl"),
    )


def _supervised_code() -> list[ModuleType]:
    """What decides how rows are encoded and models trained: a change there makes them anew."""
    from ppo_core import chat, prompts
    from ppo_core.supervised import data, loop, training

    return [chat, prompts, data, loop, training]


def _cache_folder(settings: Settings) -> Path:
    return Path(settings.output_dir) / "cache"


def _run_folder(settings: Settings, run_id: str) -> Path:
    """The folder of what this run of the flow writes."""
    folder = Path(settings.output_dir) / "runs" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest_of_model(path: str) -> str:
    """The contents of a folder, or the commit of a model of the hub."""
    from pipeline.cache import digest_of_folder
    from ppo_core.loading import load_config

    folder = Path(path)
    if folder.is_dir():
        return digest_of_folder(folder)
    return f"{path}@{load_config(path)._commit_hash}"


def _read_jsonl(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _peak_rss_bytes() -> int:
    """Most memory that this process ever held; Linux counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
