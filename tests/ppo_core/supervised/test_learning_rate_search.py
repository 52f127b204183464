"""The learning rate of supervised training: by the model's size, or searched."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from pipeline.demo.task import write_base_model
from ppo_core.config.sized_defaults import sized_defaults
from ppo_core.errors import ConfigError, DataError, TrainingError
from ppo_core.models.loading import count_parameters
from ppo_core.supervised.learning_rate_search import FACTORS
from ppo_core.supervised.supervised_config import LOSS_AT, RATE_FILE, SupervisedConfig
from ppo_core.supervised.training import train_reward_model, train_sft

WORDS = "i lost the ring it cost ten dollars felt sad".split()


def pairs(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Texts of random words, preferred if they end with "ring"."""
    rng = Random(seed)
    return [
        {
            "prompt": " ".join(rng.choices(WORDS, k=5)),
            "chosen": " ".join([*rng.choices(WORDS, k=3), "ring"]),
            "rejected": " ".join([*rng.choices(WORDS, k=3), "sad"]),
        }
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_base_model(folder, seed=1)
    return folder


def train(base: Path, folder: Path, rows: list[dict[str, str]], **changes) -> dict[str, float]:
    config = SupervisedConfig(**{"batch_size": 8, "max_length": 64, **changes})
    return train_reward_model(base, rows, config, folder)


def test_without_a_rate_the_size_of_the_model_decides(base, tmp_path):
    sized = sized_defaults(count_parameters(base), lora=False)
    config = SupervisedConfig(batch_size=2, max_length=64)
    rows = [{"prompt": "i lost the ring . tl;dr :", "completion": "lost ring"}]
    assert train_sft(base, rows, config, tmp_path / "sft")["learning_rate"] == (
        sized.sft_learning_rate
    )
    found = train(base, tmp_path / "rm", pairs(2))["learning_rate"]
    assert found == sized.reward_learning_rate


def test_a_search_takes_the_rate_with_the_least_loss_on_other_pairs(base, tmp_path):
    metrics = train(base, tmp_path / "rm", pairs(200), learning_rate="auto")
    middle = sized_defaults(count_parameters(base), lora=False).reward_learning_rate
    tried = {
        float(name.removeprefix(LOSS_AT)): loss
        for name, loss in metrics.items()
        if name.startswith(LOSS_AT)
    }
    assert list(tried) == pytest.approx([factor * middle for factor in FACTORS], rel=0.05)
    assert metrics["learning_rate"] == pytest.approx(min(tried, key=tried.__getitem__), rel=0.05)
    assert metrics["loss"] < 0.3


def test_the_model_after_a_search_is_that_of_its_rate(base, tmp_path):
    rate = train(base, tmp_path / "searched", pairs(40), learning_rate="auto")["learning_rate"]
    train(base, tmp_path / "given", pairs(40), learning_rate=rate)
    searched, given = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("searched", "given")
    )
    assert searched == given


def test_a_rate_that_diverges_is_not_taken(base, tmp_path, monkeypatch):
    monkeypatch.setattr("ppo_core.supervised.learning_rate_search.FACTORS", (1, 1e30))
    metrics = train(base, tmp_path / "rm", pairs(40), learning_rate="auto")
    assert sorted(metrics[name] == float("inf") for name in metrics if LOSS_AT in name) == [
        False,
        True,
    ]
    assert metrics["learning_rate"] == pytest.approx(2e-3)
    monkeypatch.setattr("ppo_core.supervised.learning_rate_search.FACTORS", (1e30, 1e31))
    with pytest.raises(TrainingError, match=r"diverges with each of the learning rates 2\.0e\+27"):
        train(base, tmp_path / "rm", pairs(40), learning_rate="auto")


def test_a_resumed_training_takes_the_rate_of_its_search(base, tmp_path, monkeypatch):
    config = SupervisedConfig(batch_size=8, max_length=64, learning_rate="auto", save_steps=1)
    rows = pairs(40)
    first = train_reward_model(base, rows, config, tmp_path / "rm", resume=True)

    def search(*_) -> tuple[float, dict[str, float]]:
        raise AssertionError("the search is repeated")

    monkeypatch.setattr("ppo_core.supervised.learning_rate_search.search_learning_rate", search)
    again = train_reward_model(base, rows, config, tmp_path / "rm", resume=True)
    assert {**again, "seconds": 0} == {**first, "seconds": 0}
    checkpoint = tmp_path / "rm" / f"checkpoint-{first['steps']}"
    elsewhere = train_reward_model(base, rows, config, tmp_path / "elsewhere", resume=checkpoint)
    assert {**elsewhere, "seconds": 0} == {**first, "seconds": 0}
    interrupted = train_reward_model(base, rows, config, tmp_path / "elsewhere", resume=True)
    assert {**interrupted, "seconds": 0} == {**first, "seconds": 0}
    with pytest.raises(ConfigError, match="belongs to an earlier run"):
        train_reward_model(base, rows, config, tmp_path / "rm")
    with pytest.raises(AssertionError, match="the search is repeated"):
        train_reward_model(base, rows, replace(config, seed=2), tmp_path / "rm", resume=True)
    lora = LoraConfig(r=2, target_modules="all-linear")
    with pytest.raises(AssertionError, match="the search is repeated"):
        train_reward_model(base, rows, config, tmp_path / "rm", resume=True, peft_config=lora)
    (tmp_path / "rm" / RATE_FILE).write_text("{")
    with pytest.raises(TrainingError, match=r"learning-rate\.json' is damaged"):
        train_reward_model(base, rows, config, tmp_path / "rm", resume=True)


def test_a_full_memory_ends_a_search(base, tmp_path, monkeypatch):
    def fill(*_) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("ppo_core.supervised.pair_ranker.PairRanker.score", fill)
    with pytest.raises(TrainingError, match=r"ran out of memory \(peak .* Lower batch_size"):
        train(base, tmp_path / "rm", pairs(40), learning_rate="auto")


def test_one_pair_cannot_be_searched_and_demonstrations_have_no_search(base, tmp_path):
    with pytest.raises(DataError, match="learning_rate='auto' needs at least two pairs"):
        train(base, tmp_path / "rm", pairs(1), learning_rate="auto")
    config = SupervisedConfig(learning_rate="auto")
    with pytest.raises(ConfigError, match="learning_rate='auto' is for reward models"):
        train_sft(base, [{"text": "lost ring"}], config, tmp_path / "sft")
