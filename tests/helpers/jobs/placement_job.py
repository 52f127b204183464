"""Run every step that only reads models, on the CPU and on another device; print the results.

Arguments: folder with the inputs of `tests.helpers.inputs.pipeline_inputs`; the URI of an MLflow
database in which `rlhf-policy` has a champion; and the other device, `cuda` or `other` (see
`other_device`).
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from flows.champion import load_champion
from pipeline.evaluation.evaluate_policies import evaluate_policies
from pipeline.inputs.run_data import RunData
from pipeline.judges.chat_model import Question
from pipeline.judges.judge_budget import Budget
from pipeline.judges.reward_model_judge import RewardModelJudge
from pipeline.judges.transformers_model import TransformersModel
from pipeline.results.report_files import as_json
from pipeline.results.step_records import FetchedChampion, PreparedModel
from pipeline.reward_validation.validate import Preferences
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.make_settings import make_settings
from pipeline.settings.settings import Settings
from pipeline.settings.win_rate_arguments import WinRateArguments
from pipeline.stages.model_win_rate import compare_model
from pipeline.stages.validation import _measure_judge, examine_reward_model, judge_samples
from ppo_core.config import placement
from tests.helpers.inputs.pipeline_inputs import tiny_table
from tests.helpers.models.other_device import register
from tests.helpers.servers.mlflow_store import tracking_to

Place = Callable[[], Any]


def places(folder: Path, settings: Settings) -> dict[str, Place]:
    """Each step by name: it loads its models, and returns texts and numbers."""
    data = RunData(settings)
    policy, judge = PreparedModel(path=settings.policy, digest="", metrics={}), str(folder / "rm")
    champion = FetchedChampion(version=1, model=settings.policy, tokenizer=settings.policy)
    question: Question = [{"role": "user", "content": "w1 w2"}]

    def validation() -> Any:
        judged = PreparedModel(path=judge, digest="", metrics={})
        compare = judge_samples(settings, None, Budget.of(settings.judging))
        preferences = Preferences(data.test_pairs(), data.voted_pairs())
        report = examine_reward_model(data, policy, judged, preferences, folder, compare=compare)
        return as_json(report)

    def trained_judge() -> Any:
        return _measure_judge(data, PreparedModel(path=judge, digest="", metrics={})).accuracy

    def answers() -> Any:
        other = str(folder / "other-policy")
        evaluated = evaluate_policies(settings, settings.policy, other, champion, folder)
        return [evaluated.report().kl, Path(evaluated.samples).read_text()]

    def chat_judge() -> Any:
        model, replies = (
            TransformersModel(str(folder / "chat"), JudgingConfig(max_reply_tokens=8)),
            {},
        )
        model.ask([question] * 3, lambda number, reply: replies.update({number: reply.text}))
        return replies

    def reward_judge() -> Any:
        verdict = RewardModelJudge(judge, end_of_text=True)(["w1 w2"], [("w3", "w4 w5")])
        return [verdict[0].winner, verdict[0].probability]

    def win_rate() -> Any:
        arguments = WinRateArguments(
            model=settings.policy,
            judge=settings.judge,
            eval_prompts=settings.eval_prompts,
            response_length=6,
            output_dir=str(folder / "win-rate"),
        )
        return as_json(compare_model(arguments, EvaluationConfig(), JudgingConfig()).result)

    def service() -> Any:
        served = load_champion("rlhf-policy", cache=folder / "served")
        ids = torch.tensor([[3, 4, 5]], device=served.model.device)
        return served.model(ids).logits.cpu().sum().item()

    steps = (validation, trained_judge, answers, chat_judge, reward_judge, win_rate, service)
    return {step.__name__: step for step in steps}


def devices_of(step: Place) -> tuple[list[str], Any]:
    """Run a step; return the devices of the models that it called, and its result."""
    seen: set[str] = set()
    call = torch.nn.Module.__call__

    def spied(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.update(parameter.device.type for parameter in module.parameters(recurse=False))
        return call(module, *args, **kwargs)

    with torch.no_grad(), patch.object(torch.nn.Module, "__call__", spied):
        result = step()
    return sorted(seen), result


def main(folder: Path, database: str, other: str) -> None:
    """Print a JSON object: step -> devices and result, on the CPU and on the other device."""
    table = tiny_table(folder)
    table["ppo"]["bf16"] = False  # else the reward model is validated in bf16 on CUDA
    settings = make_settings(table, {})
    found: dict[str, dict[str, Any]] = {}
    with tracking_to(database):
        with patch.object(placement, "_gpu", lambda: None):
            for name, step in places(folder, settings).items():
                found[name] = {"cpu": devices_of(step)}
        device = register() if other == "other" else torch.device(other)
        with (
            patch.object(placement, "_gpu", lambda: device),
            patch.object(placement, "_computes_in_bf16", lambda: False),
        ):
            for name, step in places(folder, settings).items():
                found[name][other] = devices_of(step)
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
