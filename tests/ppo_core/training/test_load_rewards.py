"""`python -m ppo_core --rewards`: models and functions from files, with columns of the prompts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ppo_core.checkpointing.read_checkpoint import read_newest
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.reward_names import read_rewards
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.errors import ConfigError, ModelError, TrainingError
from ppo_core.reporting.metrics_file import METRICS_FILE, read_metrics
from ppo_core.training.cli import train_ppo
from ppo_core.training.load_rewards import load_functions
from tests.helpers.inputs.pipeline_inputs import write_model, write_rows

REWARDS = """
def brevity(prompts, responses):
    return [-float(len(response.split())) for response in responses]

def level(prompts, responses, level, reference=None):
    assert all(prompt.split()[0] == f"w{n}" for prompt, n in zip(prompts, level))
    assert reference is None or len(reference) == len(prompts)
    return [float(n) for n in level]

def everything(prompts, responses, **columns):
    assert columns.keys() == {"prompt", "level", "tags"}, columns.keys()
    return [float(len(tags)) for tags in columns["tags"]]

def misspelt(prompts, responses, levle):
    raise AssertionError("called")

def one(prompts):
    raise AssertionError("called")
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "policy")
    write_model(folder / "reward", labels=1)
    write_model(folder / "other", labels=1)
    rows = [{"prompt": f"w{i} w{(7 * i) % 50}", "level": i, "tags": ["a"] * i} for i in range(32)]
    write_rows(folder / "prompts.jsonl", rows)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def train(
    inputs: Path, output: Path, *rewards: str, resume=None, own=True, end_of_text=True, **settings
) -> list:
    config = PPOConfig(
        output_dir=str(output),
        total_episodes=16,
        batch_size=8,
        response_length=4,
        reward_model_path=str(inputs / "reward") if own else None,
        num_sample_generations=0,
        save_steps=1,
        **settings,
    )
    script = ScriptArguments(
        dataset_name=str(inputs / "prompts.jsonl"),
        rewards=[reward.replace("HERE", str(inputs)) for reward in rewards] or None,
        resume_from_checkpoint=resume,
        reward_end_of_text=end_of_text,
    )
    train_ppo(config, script, ModelArguments(model_name_or_path=str(inputs / "policy")))
    return read_metrics(output / METRICS_FILE)


def means(update: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in update.items() if name.startswith("rewards/")}


def test_each_entry_is_a_reward_with_a_readable_name(inputs: Path, tmp_path: Path):
    updates = train(
        inputs,
        tmp_path,
        "reward-model",
        "reward-model:HERE/other",
        "python:HERE/rewards.py:brevity",
        "python:HERE/rewards.py:level",
        "tags=python:HERE/rewards.py:everything",
        reward_weights=[1.0, 0.5, 0.25, 0.0, 0.0],
    )
    found = means(updates[0])
    assert [*found] == [f"rewards/{n}" for n in "reward-model other brevity level tags".split()]
    assert found["rewards/level"] == found["rewards/tags"] > 0
    # Models of equal weights give equal scores.
    assert found["rewards/reward-model"] == pytest.approx(found["rewards/other"])
    expected = 1.5 * found["rewards/other"] + 0.25 * found["rewards/brevity"]
    assert updates[0]["objective/scores"] == pytest.approx(expected, rel=1e-4)


def test_without_the_setting_the_reward_model_is_alone_and_has_its_old_name(inputs, tmp_path):
    alone, listed = tmp_path / "alone", tmp_path / "listed"
    before = train(inputs, alone)
    assert [*means(before[0])] == ["rewards/LlamaForSequenceClassification"]
    after = train(inputs, listed, "reward-model")
    name = "objective/scores"
    assert [update[name] for update in before] == [update[name] for update in after]
    assert (alone / "model.safetensors").read_bytes() == (listed / "model.safetensors").read_bytes()


def test_functions_alone_need_no_reward_model(inputs: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"reward_model_path=.* would be ignored"):
        train(inputs, tmp_path, "python:HERE/rewards.py:brevity")
    with pytest.raises(ConfigError, match="reward_end_of_text=False would be ignored"):
        train(inputs, tmp_path, "python:HERE/rewards.py:brevity", own=False, end_of_text=False)
    updates = train(inputs, tmp_path, "python:HERE/rewards.py:brevity", own=False)
    assert [*means(updates[0])] == ["rewards/brevity"]


@pytest.mark.parametrize(("name", "value"), [("reward_bias", 0.5), ("reward_gain", 2.0)])
def test_a_scale_of_a_reward_model_that_is_left_out_is_refused(inputs, tmp_path, name, value):
    script = ScriptArguments(
        dataset_name=str(inputs / "prompts.jsonl"),
        rewards=[f"python:{inputs / 'rewards.py'}:brevity"],
        **{name: value},
    )
    model = ModelArguments(model_name_or_path=str(inputs / "policy"))
    with pytest.raises(ConfigError, match=f"{name}={value} would be ignored.*or remove {name}"):
        train_ppo(PPOConfig(output_dir=str(tmp_path)), script, model)


def test_a_changed_function_is_another_run(inputs: Path, tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text(REWARDS)
    train(inputs, tmp_path / "run", f"python:{own}:brevity", own=False)
    own.write_text(REWARDS + "\n# Changed.\n")
    with pytest.raises(TrainingError, match="another reward 0"):
        train(inputs, tmp_path / "run", f"python:{own}:brevity", own=False, resume="latest")
    state = json.loads((read_newest(tmp_path / "run").folder / "trainer_state.json").read_text())
    assert [*state["identity"]["models"]["reward 0"]] == ["name", "kind", "function", "file"]


def test_rewards_in_another_order_are_another_run(inputs: Path, tmp_path: Path):
    rewards = ["reward-model", "python:HERE/rewards.py:brevity"]
    train(inputs, tmp_path, *rewards)
    with pytest.raises(TrainingError, match="another reward 0"):
        train(inputs, tmp_path, *rewards[::-1], resume="latest")


@pytest.mark.parametrize(
    ("reward", "error", "says"),
    [
        ("python:HERE/rewards.py:misspelt", ConfigError, r"'levle'.*Did you mean level\?"),
        ("python:HERE/rewards.py:one", ConfigError, r"rewards='python:.*takes \(prompts\)"),
        ("python:HERE/rewards.py:gone", ConfigError, "has no function 'gone'.*prompts and resp"),
        ("python:HERE/gone.py:f", ConfigError, "gone.py does not exist"),
        ("python:no_such_module:f", ConfigError, "No module named 'no_such_module'"),
        ("python:f", ConfigError, "names no function"),
        ("reward-model:HERE/policy", ModelError, "rewards='reward-model:"),
        ("openai:gpt", ConfigError, "rewards='openai:gpt': language models .* only in the flow"),
        ("reward-model:HERE/gone", ModelError, "rewards='reward-model:"),
    ],
)
def test_a_wrong_entry_is_named_before_the_training(inputs, tmp_path, reward, error, says):
    with pytest.raises(error, match=says):
        train(inputs, tmp_path, "reward-model", reward)
    assert not (tmp_path / METRICS_FILE).exists()


def test_held_out_prompts_have_columns_too(inputs: Path, tmp_path: Path):
    rows = [{"prompt": f"w{i % 50} w1", "level": i % 50} for i in range(1100)]
    folder = tmp_path / "many"
    folder.mkdir()
    for name in ("policy", "reward", "rewards.py"):
        (folder / name).symlink_to(inputs / name)
    write_rows(folder / "prompts.jsonl", rows)
    train_settings = {"num_sample_generations": 1}
    config = PPOConfig(total_episodes=8, batch_size=8, response_length=4, save_strategy="no")
    config = replace(config, output_dir=str(tmp_path / "run"), **train_settings)
    script = ScriptArguments(
        dataset_name=str(folder / "prompts.jsonl"), rewards=[f"python:{folder}/rewards.py:level"]
    )
    train_ppo(config, script, ModelArguments(model_name_or_path=str(folder / "policy")))


def test_functions_of_one_file_are_loaded_with_its_digest(inputs: Path):
    specs = [f"python:{inputs}/rewards.py:{name}" for name in ("brevity", "level")]
    functions = load_functions(read_rewards(["reward-model", *specs]))
    assert [*functions] == ["brevity", "level"]
    assert len({one.version for one in functions.values()}) == 1
    # The file ran once, so the functions share a model or a counter at module level.
    brevity, level = (functions[name].function for name in ("brevity", "level"))
    assert brevity.__globals__ is level.__globals__
