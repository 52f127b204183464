"""SFT and reward-model training: results, refused input, and determinism."""

import math
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets.arrow_dataset import Column
from peft import LoraConfig
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from pipeline.demo.task import write_base_model
from ppo_core.data.rows.encoding import encode_row
from ppo_core.errors import ConfigError, DataError, TrainingError
from ppo_core.supervised import step_order
from ppo_core.supervised.examples.reward_pairs import pair_encoding
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.supervised.training import train_reward_model, train_sft
from ppo_core.supervised.training_loop import TrainingLoop
from tests.helpers.inputs.rows import read_row, rows_of

EXAMPLES = [
    {"prompt": "i lost the ring . tl;dr :", "completion": "lost ring"},
    {"prompt": "it cost ten dollars . i felt sad . tl;dr :", "completion": "cost ten felt sad"},
]
PAIRS = [
    {"prompt": "i lost the ring . tl;dr :", "chosen": "lost ring", "rejected": "lost tent"},
    {"prompt": "i felt sad . tl;dr :", "chosen": "felt sad", "rejected": ""},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_base_model(folder, seed=1)
    return folder


def settings(**changes) -> SupervisedConfig:
    return SupervisedConfig(**{"learning_rate": 1e-3, "batch_size": 2, "max_length": 64, **changes})


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


# --- The trainings ---------------------------------------------------------------


def test_sft_learns_its_examples(base, tmp_path):
    metrics = train_sft(base, EXAMPLES, settings(num_epochs=30), tmp_path / "sft")
    assert metrics["steps"] == 30
    assert metrics["rows"] == 2
    assert metrics["loss"] < 0.1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "sft")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "sft")
    prompt = tokenizer(EXAMPLES[0]["prompt"], return_tensors="pt")["input_ids"]
    answer = model.generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer) == "lost ring <eos>"


def reward_weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForSequenceClassification.from_pretrained(folder).state_dict()


def test_a_step_whose_rows_all_have_the_weight_0_has_no_gradient(base, tmp_path):
    rows = rows_of("feedback", [{"prompt": "i felt", "chosen": "sad", "weight": 0}])
    assert train_reward_model(base, rows, settings(), tmp_path / "rm")["loss"] == 0
    trained, start = reward_weights(tmp_path / "rm"), weights(base)
    assert all(trained[name].equal(start[name]) for name in trained.keys() & start.keys())


@pytest.mark.parametrize("lora", [False, True])
def test_the_training_of_a_reward_model_continues_with_its_head(base, tmp_path, lora: bool):
    first = train_reward_model(base, PAIRS, settings(num_epochs=10), tmp_path / "first")
    adapter = LoraConfig(r=2, target_modules="all-linear") if lora else None
    again = train_reward_model(
        tmp_path / "first",
        PAIRS,
        settings(learning_rate=1e-12),
        tmp_path / "again",
        peft_config=adapter,
    )
    assert_close(reward_weights(tmp_path / "again"), reward_weights(tmp_path / "first"))
    assert again["loss"] < first["loss"] < 0.7


def test_reward_model_learns_its_pairs_and_loads_as_a_classifier_with_one_label(base, tmp_path):
    metrics = train_reward_model(base, PAIRS, settings(num_epochs=30), tmp_path / "rm")
    assert metrics["loss"] < 0.1
    assert (tmp_path / "rm" / "model.safetensors").exists()
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert saved.config.num_labels == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    encoding = pair_encoding(tokenizer, settings())
    ids = [encode_row(tokenizer, encoding, read_row("pairs", pair)) for pair in PAIRS]
    chosen, rejected = (
        [saved(torch.tensor([pair[name]])).logits.item() for pair in ids]
        for name in ("chosen", "rejected")
    )
    assert chosen[0] > rejected[0]
    assert chosen[1] > rejected[1]


@pytest.mark.parametrize(
    ("train", "rows", "texts"), [(train_sft, EXAMPLES, 1), (train_reward_model, PAIRS, 2)]
)
def test_passes_of_few_tokens_give_the_weights_of_large_ones(
    base, tmp_path, monkeypatch, train, rows, texts
):
    """On a CPU the tokens of a pass are limited, and the sums of a step are those of its rows."""
    config, passes = settings(batch_size=6, bf16=False), []
    own_batches = TrainingLoop._own_batches

    def noted(loop, step):
        batches = own_batches(loop, step)
        passes.append([batch["input_ids"].numel() for batch in batches])
        return batches

    monkeypatch.setattr(TrainingLoop, "_own_batches", noted)
    for name, tokens in (("large", 1024), ("small", 40)):
        monkeypatch.setattr(step_order, "TOKENS_ON_CPU", tokens)
        passes.clear()
        metrics = train(base, rows * 5, config, tmp_path / name)
        assert metrics["rows"] == len(rows) * 5
        assert max(map(max, passes)) <= max(tokens, texts * 64)
    assert max(map(len, passes)) > 1
    large, small = (load_file(tmp_path / name / "model.safetensors") for name in ("large", "small"))
    for name, tensor in large.items():
        assert_close(small[name], tensor, rtol=0, atol=1e-5)


def test_the_bar_counts_rows_and_moves_within_a_step(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_order, "TOKENS_ON_CPU", 40)
    monkeypatch.setattr("ppo_core.io.progress_bar.SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr("ppo_core.io.progress_bar.LINES_PER_PHASE", 20)
    train_sft(base, EXAMPLES * 5, settings(batch_size=6, num_epochs=2), tmp_path / "sft")
    counts = [int(n) for n in re.findall(r": (\d+)/20 row", capsys.readouterr().err)]
    assert counts == sorted(counts) and counts[-1] == 20
    # Of 4 steps.
    assert len(set(counts)) > 5


def test_the_lengths_of_the_rows_are_read_as_a_whole(base, tmp_path, monkeypatch):
    read = Column.__getitem__

    def read_slice(column, key):
        # One number at a time takes minutes for a million rows.
        assert isinstance(key, slice)
        return read(column, key)

    monkeypatch.setattr(Column, "__getitem__", read_slice)
    train_sft(base, EXAMPLES, settings(num_epochs=1), tmp_path / "sft")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights_bit_for_bit_and_another_does_not(base, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        config = settings(batch_size=1, seed=seed)
        # More than 50 batches: fewer are all sorted by length, whatever the seed.
        train_sft(base, EXAMPLES * 30, config, tmp_path / name)
        train_reward_model(tmp_path / name, PAIRS * 30, config, tmp_path / f"rm-{name}")
    for kind in ("", "rm-"):
        a, b, c = (
            (tmp_path / f"{kind}{name}" / "model.safetensors").read_bytes() for name in "abc"
        )
        assert a == b
        assert a != c


def test_the_model_that_training_starts_from_is_left_as_it_was(base, tmp_path):
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    train_sft(base, EXAMPLES, settings(), tmp_path / "sft")
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before


def test_two_batches_of_one_row_are_one_step_of_a_batch_of_two(base, tmp_path):
    rows = [EXAMPLES[0], {"prompt": "sad", "completion": "lost ring " * 20}]
    for name, changes in {
        "full": {"batch_size": 2},
        "parts": {"batch_size": 1, "gradient_accumulation_steps": 2},
    }.items():
        config = settings(num_epochs=3, **changes)
        metrics = train_sft(base, rows, config, tmp_path / name)
        assert metrics["steps"] == 3
    # Adam divides by the size of the gradient, which amplifies rounding of gradients near 0.
    full, parts = weights(tmp_path / "full"), weights(tmp_path / "parts")
    assert_close(full, parts, rtol=0, atol=1e-4)


def test_bf16_changes_the_arithmetic_and_not_the_kind_of_the_weights(base, tmp_path):
    for bf16 in (False, True):
        config = settings(bf16=bf16, warmup_ratio=0.0)
        train_sft(base, EXAMPLES, config, tmp_path / f"sft-{bf16}")
        train_reward_model(base, PAIRS, config, tmp_path / f"rm-{bf16}")
    for kind in ("sft", "rm"):
        full, half = (
            load_file(tmp_path / f"{kind}-{bf16}" / "model.safetensors") for bf16 in (False, True)
        )
        assert {tensor.dtype for tensor in half.values()} == {torch.float32}
        assert any(not torch.equal(full[name], half[name]) for name in full)


def test_gradient_checkpointing_computes_layers_again_and_changes_no_weight(base, tmp_path):
    for train, rows in ((train_sft, EXAMPLES), (train_reward_model, PAIRS)):
        calls = {}
        for on in (False, True):
            folder = tmp_path / f"{train.__name__}-{on}"
            config = settings(gradient_checkpointing=on, warmup_ratio=0.0)
            with counting_calls(LlamaMLP) as count:
                train(base, rows, config, folder)
            calls[on] = count[0]
        # one optimizer step through 3 layers
        assert calls == {False: 3, True: 6}
        plain, again = (
            load_file(tmp_path / f"{train.__name__}-{on}" / "model.safetensors")
            for on in (False, True)
        )
        assert_close(plain, again, rtol=0, atol=1e-7)


def test_a_training_resumes_with_smaller_batches_and_less_memory(base, tmp_path):
    config = settings(save_steps=1, batch_size=2, num_epochs=2)
    whole = train_sft(base, EXAMPLES, config, tmp_path / "sft")
    shutil.rmtree(tmp_path / "sft" / "checkpoint-2")
    smaller = replace(
        config, batch_size=1, gradient_accumulation_steps=2, gradient_checkpointing=True
    )
    resumed = train_sft(base, EXAMPLES, smaller, tmp_path / "sft", resume=True)
    assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    fewer_rows = replace(config, batch_size=1)
    with pytest.raises(TrainingError, match="written with rows_per_step=2, which is now 1"):
        train_sft(base, EXAMPLES, fewer_rows, tmp_path / "sft", resume=True)


def test_a_training_of_adapters_resumes_only_with_their_settings(base, tmp_path):
    config = settings(save_steps=1)
    adapters = {"r": 2, "target_modules": ["q_proj"], "lora_dropout": 0.0}
    train_sft(base, EXAMPLES, config, tmp_path, peft_config=LoraConfig(**adapters, lora_alpha=4))
    with pytest.raises(TrainingError, match=r"with another adapter: .* lora_alpha, which"):
        train_sft(
            base,
            EXAMPLES,
            config,
            tmp_path,
            peft_config=LoraConfig(**adapters, lora_alpha=8),
            resume=True,
        )


@contextmanager
def counting_calls(kind):
    count = [0]

    def count_one(module, *_):
        # Without the passes that compare the model's logits with our own.
        count[0] += isinstance(module, kind) and torch.is_grad_enabled()

    hook = register_module_forward_pre_hook(count_one)
    yield count
    hook.remove()


# --- Refused input ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "is empty"),
        (
            [{"prompt": "sad", "text": "sad"}],
            r"no column completion .* the columns are prompt, text",
        ),
        ([{"prompt": None, "completion": "sad"}], "without a text or messages in the prompt"),
        (
            [EXAMPLES[0], {"prompt": "sad " * 62, "completion": "sad"}],
            "1 of the 2 rows .* 1 with more than 64 tokens",
        ),
    ],
)
def test_unusable_examples_are_refused_before_training(base, tmp_path, examples, message):
    with pytest.raises(DataError, match=message):
        train_sft(base, examples, settings(), tmp_path / "sft")
    assert not any((tmp_path / "sft").iterdir())


def test_rows_beyond_the_models_context_are_refused_whatever_the_settings_say(base, tmp_path):
    rows = [{"chosen": "sad " * 200, "rejected": "sad"}]
    with pytest.raises(DataError, match="with more than 128 tokens"):
        train_reward_model(base, rows, settings(max_length=1000), tmp_path / "rm")


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.norm.weight.data.fill_(math.nan)
    model.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "broken")
    with pytest.raises(TrainingError, match="loss is nan at step 1"):
        train_sft(tmp_path / "broken", EXAMPLES, settings(), tmp_path / "sft")
    assert not (tmp_path / "sft" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("train", "rows", "changes"),
    [
        (train_sft, EXAMPLES, {"center_rewards_coefficient": 0.01}),
        (train_sft, EXAMPLES, {"repeated_text_pairs": 0.1}),
        (train_reward_model, PAIRS, {"completion_only_loss": False}),
    ],
)
def test_a_setting_of_the_other_training_is_refused_by_name(base, tmp_path, train, rows, changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        train(base, rows, settings(**changes), tmp_path / "out")


def test_an_output_folder_that_cannot_be_created_is_refused_before_training(base, tmp_path):
    (tmp_path / "file").touch()
    folder, file = tmp_path / "out", tmp_path / "file" / "sft"
    with pytest.raises(ConfigError, match="output_dir: nothing can be written into"):
        train_sft(base, EXAMPLES, settings(), file)
    with pytest.raises(ConfigError, match="model_dir: nothing can be written into"):
        train_reward_model(base, PAIRS, settings(), folder, model_dir=file)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("num_epochs", 0),
        ("batch_size", 0),
        ("max_length", 0),
        ("warmup_ratio", 1.0),
        ("weight_decay", -0.1),
        ("gradient_accumulation_steps", 0),
        ("center_rewards_coefficient", -0.1),
        ("save_total_limit", 1),
    ],
)
def test_settings_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        SupervisedConfig(**{name: value})
