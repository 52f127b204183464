"""The stages of the flow: settings and paths in, paths and small numbers out.

Each stage imports what it needs when it runs: the flow is also parsed where nothing but
Metaflow is installed, and by the scheduler, which would wait for torch.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.settings import Settings
    from ppo_core.evaluation import Answers

NUM_SAMPLES = 20
"""Prompts whose answers are shown beside the registered policy."""

Result = dict[str, Any]
"""What a stage hands on: paths as text, and small numbers."""


def read_settings(from_file: Mapping[str, Any], from_command_line: Mapping[str, Any]) -> Settings:
    """Read the settings strictly and refuse every input that would fail later."""
    from pipeline.inputs import check_inputs, require_writable
    from pipeline.registry.connection import check_registry
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
            "model": cache.digest_of_model(settings.policy),
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
            "model": cache.digest_of_model(sft["path"]),
            "rows": rows.digest,
            "settings": asdict(training),
            "code": cache.digest_of_code(*_supervised_code()),
        },
        lambda folder: train_reward_model(sft["path"], rows.usable, training, folder),
    )
    return {"path": str(made.path), "metrics": made.metrics}


def start_tracking(settings: Settings, run_id: str) -> str:
    """A run in MLflow with these settings; returns its id there."""
    from pipeline.registry.tracking import start_run
    from pipeline.settings import as_plain_dict

    return start_run(run_id, as_plain_dict(settings))


def validate_reward_model(
    settings: Settings, sft: Result, reward_model: Result, tracking_run: str
) -> Result:
    """What there is to know about the reward model before anything is trained against it."""
    from pipeline import inputs
    from pipeline.figures import reward_model_figures
    from pipeline.headlines import reward_model_numbers
    from pipeline.registry.tracking import log_reward_report
    from pipeline.report_page import reward_model_page
    from pipeline.reward_validation.samples import draw_samples
    from pipeline.reward_validation.validate import validate
    from ppo_core.loading import load_reward_model

    model = load_reward_model(
        reward_model["path"], end_of_text=settings.reward_model_training.end_of_text
    )
    report = validate(
        model,
        inputs.test_pairs(settings),
        inputs.training_prompts(settings),
        partial(
            draw_samples,
            sft["path"],
            response_length=settings.ppo.response_length,
            temperature=settings.ppo.temperature,
            seed=settings.seed,
            stop=settings.ppo.stop_token,
            stop_token_id=settings.ppo.stop_token_id,
            batch_size=settings.ppo.local_rollout_forward_batch_size,
        ),
        settings.reward_gate,
        seed=settings.seed,
    )
    report["accepted_by_hand"] = settings.accept_reward_model and not report["fit"]
    log_reward_report(
        tracking_run,
        report,
        numbers=reward_model_numbers(report),
        page=reward_model_page(report),
        figures=reward_model_figures(report),
    )
    return report


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
    settings: Settings, sft: Result, reward_model: Result, validation: Result, run_id: str
) -> Result:
    """Train the policy with PPO against the reward model."""
    from pipeline import inputs
    from pipeline.metrics_file import MetricsFile
    from ppo_core.loading import load_policy, load_reward_model, load_tokenizer
    from ppo_core.trainer import PPOTrainer

    require_fit_reward_model(validation)
    folder = _run_folder(settings, run_id)
    trainer = PPOTrainer(
        args=replace(settings.ppo, output_dir=str(folder / "ppo")),
        processing_class=load_tokenizer(sft["path"]),
        model=load_policy(sft["path"]),
        ref_model=load_policy(sft["path"]),
        reward_model=load_reward_model(
            reward_model["path"],
            bias=validation["bias"],
            gain=validation["gain"],
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
    from pipeline.evaluation import distinct_share, evaluate, judgements
    from pipeline.judges.spec import make_judge
    from pipeline.win_rate import compare_policies

    rows = inputs.examples(settings.eval_prompts, settings.evaluation)
    prompts = [row["prompt"] for row in rows]
    answers = {
        "sft": _answer(settings, sft["path"], sft["path"], prompts),
        "ppo": _answer(settings, policy["path"], sft["path"], prompts),
    }
    texts = {"reference": [row["reference"] for row in rows]}
    texts |= {who: given.texts for who, given in answers.items()}
    judge = make_judge(
        settings.judge,
        config=settings.judging,
        cache_folder=_cache_folder(settings) / "replies",
        end_of_text=settings.reward_model_training.end_of_text,
    )
    evaluation = evaluate(
        judge,
        prompts,
        texts,
        [("sft", "reference"), ("ppo", "reference"), ("ppo", "sft")],
        people=inputs.human_labels(settings.evaluation),
        config=settings.evaluation,
        seed=settings.seed,
    )
    improvement = compare_policies(
        evaluation.comparisons["ppo_vs_reference"],
        evaluation.comparisons["sft_vs_reference"],
        seed=settings.seed,
    )
    folder = _run_folder(settings, run_id)
    columns = {"prompt": prompts, **texts}
    write_jsonl(
        folder / "samples.jsonl",
        [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
    )
    write_jsonl(folder / "judgements.jsonl", judgements(evaluation))
    return {
        **evaluation.result,
        "improvement": asdict(improvement),
        "kl": {who: given.kl for who, given in answers.items()},
        "distinct": {who: distinct_share(given.texts) for who, given in answers.items()},
        "samples": str(folder / "samples.jsonl"),
        "judgements": str(folder / "judgements.jsonl"),
    }


def reward_model_card(validation: Result) -> list[Any]:
    """What a person looks at after the validation."""
    from pipeline.cards import reward_model_card

    return reward_model_card(validation)


def evaluation_card(evaluation: Result) -> list[Any]:
    """What a person looks at after the evaluation."""
    from pipeline.cards import evaluation_card

    return evaluation_card(evaluation)


def register(settings: Settings, policy: Result, evaluation: Result, tracking_run: str) -> Result:
    """Register the policy in MLflow with the run's metrics and samples."""
    from pipeline.headlines import evaluation_numbers
    from pipeline.registry.versions import register_policy

    return register_policy(
        Path(policy["path"]),
        settings.registered_model,
        run_id=tracking_run,
        updates=_read_jsonl(policy["updates"]),
        numbers={
            **evaluation_numbers(evaluation),
            "episodes_per_second": policy["episodes_per_second"],
            "peak_rss_bytes": policy["peak_rss_bytes"],
        },
        files=[Path(evaluation["judgements"])],
        samples=_read_jsonl(evaluation["samples"])[:NUM_SAMPLES],
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
    from pipeline.registry.tracking import log_summary
    from pipeline.report import render_summary
    from pipeline.settings import as_plain_dict

    summary = {
        **evaluation,
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
    from pipeline.demo_task import find_demo_task

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


def _answer(settings: Settings, policy: str, reference: str, prompts: Sequence[str]) -> Answers:
    """One answer of the policy in a folder to each prompt, compared with a reference."""
    from ppo_core.evaluation import answer_prompts
    from ppo_core.loading import load_policy, load_tokenizer

    return answer_prompts(
        load_policy(policy),
        load_tokenizer(policy),
        prompts,
        response_length=settings.ppo.response_length,
        temperature=settings.evaluation.temperature,
        top_k=settings.evaluation.top_k,
        top_p=settings.evaluation.top_p,
        seed=settings.seed,
        batch_size=settings.ppo.local_rollout_forward_batch_size,
        stop=settings.ppo.stop_token,
        stop_token_id=settings.ppo.stop_token_id,
        reference=load_policy(reference),
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


def _read_jsonl(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _peak_rss_bytes() -> int:
    """Most memory that this process ever held; Linux counts it in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
