"""The work of the flow in one plain process.

    python -m tests.benchmarks.measure_flow_work make FOLDER EPISODES
    python -m tests.benchmarks.measure_flow_work run FOLDER

`make` writes the built-in task to FOLDER, with a settings file that the flow reads too. `run` calls
the functions of the steps of `flows/rlhf.py` in their order, as a script would, without Metaflow,
MLflow and cards, and prints the seconds by step as JSON.
"""

import json
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import ppo_core.__main__
from pipeline import stages
from pipeline.demo.task import build_demo_task
from pipeline.evaluation.evaluate_policies import evaluate_policies
from pipeline.inputs.run_data import RunData
from pipeline.inputs.run_rewards import RunRewards
from pipeline.judges.judge_budget import Budget
from pipeline.launch.job import JobModels, write_job
from pipeline.preflight.check_inputs import check_inputs
from pipeline.results.reward_report import RewardReport
from pipeline.results.step_records import PreparedModel
from pipeline.reward_validation.validate import Preferences
from pipeline.settings.make_settings import make_settings, read_preset, settings_text
from pipeline.settings.settings import Settings
from ppo_core.models.kernels.cpu_memory import keep_few_compiled_matmuls
from ppo_core.supervised.training import train_reward_model, train_sft

SETTINGS = "settings.toml"

TRAINING_ROWS = 2000
"""Training rows of demonstrations and of preferences, out of ten thousand each."""


def make_task(folder: Path, episodes: int) -> None:
    """Write the files of the built-in task, with fewer training rows, and its settings file."""
    task = folder / "task"
    build_demo_task(task, seed=1)
    for name in ("sft.jsonl", "preferences-train.jsonl"):
        rows = (task / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (task / name).write_text("".join(rows[:TRAINING_ROWS]), encoding="utf-8")
    table = read_preset("tldr") | {
        "task": "",
        "policy": str(task / "base"),
        "sft_data": str(task / "sft.jsonl"),
        "preferences": str(task / "preferences-train.jsonl"),
        "preferences_test": str(task / "preferences-test.jsonl"),
        "prompts": str(task / "prompts-train.jsonl"),
        "eval_prompts": str(task / "prompts-eval.jsonl"),
        "output_dir": str(folder / "outputs"),
        # A reward model of so few pairs may fail its validation; later steps cost the same.
        "accept_reward_model": True,
    }
    settings = make_settings(table, {"total_episodes": episodes})
    (folder / SETTINGS).write_text(settings_text(settings), encoding="utf-8")


def work_of(settings: Settings, folder: Path) -> dict[str, Callable[[], object]]:
    """Return the work of each step, by name, in the order of the flow."""
    sft, rewarder, policy = folder / "sft", folder / "reward-model", folder / "policy"
    reports: list[RewardReport] = []

    def validate() -> None:
        data, budget = RunData(settings), Budget.of(settings.judging)
        reports.append(
            stages.validation.examine_reward_model(
                data,
                PreparedModel(path=str(sft), digest="", metrics={}),
                PreparedModel(path=str(rewarder), digest="", metrics={}),
                Preferences(data.test_pairs()),
                folder,
                compare=stages.validation.judge_samples(settings, None, budget),
            )
        )

    def train_policy() -> None:
        job = write_job(
            RunRewards(RunData(settings)),
            JobModels(
                policy=str(sft),
                reward_model=str(rewarder),
                reward_bias=reports[0].bias,
                reward_gain=reports[0].gain,
            ),
            folder=folder / "ppo",
            policy_dir=policy,
        )
        if ppo_core.__main__.main([str(job)]):
            sys.exit("PPO has failed; its reason is above.")

    return {
        "start": lambda: check_inputs(settings),
        "load_policy": lambda: train_sft(
            settings.policy, RunData(settings).sft_rows(), settings.sft, sft
        ),
        "load_reward_model": lambda: train_reward_model(
            sft, RunData(settings).training_pairs(), settings.reward_model_training, rewarder
        ),
        "validate_reward_model": validate,
        "train_policy": train_policy,
        "evaluate_win_rate": lambda: evaluate_policies(
            settings, str(sft), str(policy), None, folder
        ),
    }


def run(folder: Path) -> dict[str, float]:
    """Do all the work; return the seconds of each step."""
    keep_few_compiled_matmuls()
    settings = make_settings(tomllib.loads((folder / SETTINGS).read_text(encoding="utf-8")), {})
    script = folder / "script"
    script.mkdir()
    seconds = {}
    for step, work in work_of(settings, script).items():
        started = time.perf_counter()
        work()
        seconds[step] = time.perf_counter() - started
    return seconds


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", folder, episodes]:
            make_task(Path(folder), int(episodes))
        case ["run", folder]:
            print(json.dumps(run(Path(folder))))
