"""Full trainings in two processes, with every kind of model, end as in one process."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from ppo_core.data.batching import token_batches
from ppo_core.models.adapters import add_adapter
from ppo_core.models.critic import Critic
from ppo_core.models.policy import LanguageModel
from ppo_core.models.reward_adapter import load_reward_adapter
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.logprobs_and_values import critic_values, response_logprobs
from ppo_core.ppo.rewards import score_tokens
from ppo_core.ppo.scoring import score
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.helpers.jobs.recovery_job import weights_and_moments
from tests.helpers.models.rollouts import make_rollout
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.ppo_core.distributed.test_choose_sharding import run_call
from tests.ppo_core.models.test_adapters import save_classifier
from tests.ppo_core.training.test_export import without_clocks
from tests.ppo_core.training.test_trainer import CONFIG, PROMPTS, make_trainer

UNEVEN = dataclasses.replace(
    CONFIG,
    total_episodes=30,
    batch_size=15,
    num_mini_batches=3,
    per_device_train_batch_size=2,
    local_rollout_forward_batch_size=3,
    per_device_eval_batch_size=2,
    kl_estimator="full",
    kl_in_loss=True,
    num_sample_generations=0,
    save_strategy="steps",
    save_steps=1,
    save_policies=1,
)
"""No size is divisible by two, and every model takes part in the update."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {"ptx_coef": 0.1},
    "adapter": {},
    "reward adapter": {"shared_critic": True},
    "tied": {"shared_critic": True, "reference_refresh_updates": 1},
    "averaged weights": {"ema_decay": 0.5},
}
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
TOLERANCE = 1e-5


def make_run(case: str, folder: Path, **settings: Any) -> PPOTrainer:
    """Return the trainer of a case; its reward adapter, if any, is beside its folder."""
    parts: dict[str, Any] = {"ref_model": None}
    if case == "plain":
        parts["pretrain_dataset"] = [text for text in PROMPTS if " " in text]
    elif case == "adapter":
        parts["peft_config"] = peft.LoraConfig(**LORA)
    elif case == "reward adapter":
        model = add_adapter(make_policy("qwen2"), peft.LoraConfig(**LORA))
        reward = load_reward_adapter(model, folder.parent / "reward")
        parts |= {"model": model, "reward_model": RewardModel(reward, make_tokenizer())}
    elif case == "tied":
        reward = RewardModel(make_classifier("gpt2"), make_tokenizer())
        parts |= {"model": make_policy("gpt2"), "reward_model": reward}
    config = dataclasses.replace(UNEVEN, output_dir=str(folder), **CASES[case], **settings)
    return make_trainer(config, eval_dataset=PROMPTS[:5], **parts)


def train(case: str, folder: str, settings: dict[str, Any]) -> None:
    """Train, and resume for the second half again; the main process saves the result."""
    torch.set_num_threads(1)
    trainer = make_run(case, Path(folder), **settings)
    history = without_clocks(trainer.train())
    ended = weights_and_moments(trainer)
    rest = trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    assert without_clocks(rest) == history[1:]
    again = weights_and_moments(trainer)
    assert again.keys() == ended.keys()
    assert not [name for name, tensor in ended.items() if not torch.equal(again[name], tensor)]
    completions = trainer.generate_completions()
    trainer.save_model(f"{folder}/policy")
    if trainer.is_world_process_zero():
        save_file({name: t.cpu().clone() for name, t in ended.items()}, f"{folder}/ended.st")
        answers = completions.responses, completions.scores
        Path(folder, "said.json").write_text(json.dumps([history, *answers]))
    trainer.engine.accelerator.wait_for_everyone()


def call_of(case: str, folder: Path, settings: dict[str, Any]) -> str:
    return f"tests.ppo_core.distributed.test_sharded_training.train{(case, str(folder), settings)}"


SCORED = dataclasses.replace(CONFIG, local_rollout_forward_batch_size=8, kl_estimator="full")


def score_unequal_lengths(sharding: str, folder: str) -> None:
    """Score responses that `token_batches` puts into 1 batch in process 0, 2 in process 1."""
    torch.set_num_threads(1)
    settings = {"sharding": sharding, "ds3_gather_for_generation": False, "ddp_timeout": 60}
    trainer = make_trainer(dataclasses.replace(SCORED, output_dir=folder, **settings))
    lengths = [60] * 8 if trainer.engine.is_main else [60, 1] * 4
    rollout = make_rollout([2] * 8, lengths)
    assert len(token_batches(rollout.row_lengths, 8)) == 1 + trainer.engine.rank
    module = trainer._train_state.module
    found = score(rollout, [""] * 8, trainer._models, module, trainer.engine, trainer.args)
    alone = LanguageModel(make_policy())
    assert_close(found.ref_logprobs, response_logprobs(alone, rollout, 8))
    reward_model = RewardModel(make_classifier(), make_tokenizer())
    critic = Critic.from_reward_model(reward_model)
    assert_close(found.values, critic_values(critic, rollout, 8))
    assert_close(found.scores, score_tokens(reward_model, rollout, 8))
    assert found.full_kl is not None
    assert_close(found.full_kl, torch.zeros_like(found.full_kl), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sharding", ["fsdp2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_scoring_of_unequal_lengths_ends_and_equals_that_of_one_process(sharding, tmp_path):
    module = "tests.ppo_core.distributed.test_sharded_training"
    run_call(tmp_path, f"{module}.score_unequal_lengths{sharding, str(tmp_path)}")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Any:
    """Return a function that trains a case in one process and returns its folder."""
    folders: dict[str, Path] = {}

    def of_case(case: str) -> Path:
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp("case") / "alone"
            folders[case].mkdir()
            if case == "reward adapter":
                save_classifier(make_policy("qwen2"), folders[case].parent)
            run_call(folders[case], call_of(case, folders[case], {}), processes=1)
        return folders[case]

    return of_case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sharding", "gather"),
    [
        ("plain", "zero2", True),
        ("plain", "zero3", True),
        ("plain", "zero3", False),
        ("plain", "fsdp2", True),
        ("plain", "fsdp2", False),
        ("adapter", "zero2", True),
        ("adapter", "zero3", False),
        ("adapter", "fsdp2", False),
        ("reward adapter", "zero3", True),
        ("reward adapter", "fsdp2", True),
        ("tied", "zero3", True),
        ("tied", "zero3", False),
        ("tied", "fsdp2", False),
        ("averaged weights", "zero2", True),
    ],
)
def test_a_sharded_training_ends_as_that_of_one_process(alone, case, sharding, gather):
    expected = alone(case)
    folder = expected.parent / f"{sharding}-{gather}"
    folder.mkdir()
    settings = {
        "sharding": sharding,
        "ds3_gather_for_generation": gather,
        "gradient_checkpointing": not gather,
    }
    run_call(folder, call_of(case, folder, settings))
    (found, texts, scores), (history, texts_alone, scores_alone) = (
        json.loads((one / "said.json").read_text()) for one in (folder, expected)
    )
    for row, row_alone in zip(found, history, strict=True):
        assert row == pytest.approx(row_alone, abs=TOLERANCE)
    assert texts == texts_alone
    assert scores == pytest.approx(scores_alone, abs=TOLERANCE)
    files = ("ended.st", "policy/model.safetensors", "policies/1/model.safetensors")
    for file in files:
        tensors, tensors_alone = load_file(folder / file), load_file(expected / file)
        assert tensors.keys() == tensors_alone.keys()
        for name, tensor in tensors_alone.items():
            assert_close(tensors[name], tensor, rtol=0, atol=TOLERANCE, msg=f"{file} {name}")
