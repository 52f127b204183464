"""LoRA in supervised training: changed and unchanged weights, saved models, refused input."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError, ModelError
from ppo_core.models.loading import load_policy
from ppo_core.supervised.lora import (
    add_task_adapter,
    exact_weights,
    keep_frozen_in_bf16,
    require_plain,
)
from ppo_core.supervised.pair_ranker import make_classifier
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.supervised.training import train_reward_model, train_sft
from tests.helpers.models.chat import make_chat_tokenizer
from tests.helpers.models.tiny import make_policy
from tests.helpers.slow_cases import slow

EXAMPLES = [{"prompt": "w0 w1", "completion": "w2"}, {"prompt": "w3", "completion": "w4 w5"}]
PAIRS = [{"prompt": "w0", "chosen": "w1", "rejected": "w2"}]
CONFIG = SupervisedConfig(learning_rate=1e-2, num_epochs=3, batch_size=2, max_length=64)
IDS = torch.tensor([[3, 4, 5, 6, 1]])


def lora(**changes) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **changes})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_policy().save_pretrained(folder)
    make_chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sft(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    train_sft(base, EXAMPLES, CONFIG, folder, peft_config=lora())
    return folder


@pytest.fixture(scope="module")
def reward(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward")
    train_reward_model(base, PAIRS, CONFIG, folder, peft_config=lora())
    return folder


def moved(before: torch.nn.Module, after: torch.nn.Module) -> set[str]:
    """Names of the weights that differ."""
    now = after.state_dict()
    assert before.state_dict().keys() == now.keys()
    return {name for name, weight in before.state_dict().items() if not weight.equal(now[name])}


ADAPTED = {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}


def test_sft_moves_the_adapted_weights_alone(base, sft):
    assert moved(load_policy(base), load_policy(sft)) == ADAPTED


def test_the_saved_policy_is_the_base_with_its_adapter(base, sft):
    apart = PeftModel.from_pretrained(load_policy(base), sft / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(sft).eval()
    assert_close(merged(IDS).logits, apart(IDS).logits, rtol=0, atol=1e-5)
    assert (merged(IDS).logits - load_policy(base)(IDS).logits).abs().max() > 1e-3


def test_the_reward_model_moves_the_adapted_weights_and_its_head(base, reward):
    before = make_classifier(load_policy(base), pad_token_id=0)
    # Otherwise the head has what lay in its memory, which may be the head that was trained.
    torch.nn.init.zeros_(before.score.weight)
    after = AutoModelForSequenceClassification.from_pretrained(reward)
    assert moved(before, after) == ADAPTED | {"score.weight"}
    assert after.config.num_labels == 1


def test_the_head_is_trained_and_does_not_stay_as_it_was_drawn(base, tmp_path):
    still = SupervisedConfig(learning_rate=1e-12, batch_size=2, max_length=64)
    heads = []
    for name, config in {"still": still, "trained": CONFIG}.items():
        train_reward_model(base, PAIRS, config, tmp_path / name, peft_config=lora())
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / name)
        heads.append(model.score.weight)
    assert (heads[0] - heads[1]).abs().max() > 1e-3


def test_the_saved_reward_model_is_the_base_with_its_adapter_and_head(base, reward):
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=0)
    apart = PeftModel.from_pretrained(plain, reward / "adapter").eval()
    merged = AutoModelForSequenceClassification.from_pretrained(reward).eval()
    assert_close(merged(IDS).logits, apart(IDS).logits, rtol=0, atol=1e-5)


def test_checkpointing_and_bf16_train_adapters_too(base, tmp_path):
    config = SupervisedConfig(
        learning_rate=1e-2, num_epochs=2, max_length=64, gradient_checkpointing=True, bf16=True
    )
    train_sft(base, EXAMPLES, config, tmp_path / "sft", peft_config=lora())
    assert moved(load_policy(base), load_policy(tmp_path / "sft")) == ADAPTED


IN_BF16 = SupervisedConfig(learning_rate=1e-2, num_epochs=3, max_length=64, bf16=True)


@pytest.mark.parametrize("family", ["llama", *slow("gpt2", "gpt_neox", "qwen2")])
@pytest.mark.parametrize(("train", "rows"), [(train_sft, EXAMPLES), (train_reward_model, PAIRS)])
def test_frozen_matrices_in_bf16_train_the_same_model_bit_for_bit(
    train, rows, family, tmp_path, monkeypatch
):
    start = tmp_path / "start"
    make_policy(family=family).save_pretrained(start)
    make_chat_tokenizer().save_pretrained(start)
    halved = []

    def keep(adapted, engine):
        keep_frozen_in_bf16(adapted, engine)
        halved.extend(p for p in adapted.parameters() if p.dtype == torch.bfloat16)

    for name, how in (("fp32", lambda adapted, engine: None), ("bf16", keep)):
        monkeypatch.setattr("ppo_core.supervised.training_loop.keep_frozen_in_bf16", how)
        changes = {"target_modules": "all-linear", "lora_dropout": 0.1}
        train(start, rows, IN_BF16, tmp_path / name, peft_config=lora(**changes))
    assert halved
    assert not any(parameter.requires_grad for parameter in halved)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "bf16" / file).read_bytes() == (tmp_path / "fp32" / file).read_bytes()


def test_the_learning_rate_is_searched_with_frozen_matrices_in_bf16(base, tmp_path):
    pairs = [{**PAIRS[0], "prompt": f"w{number}"} for number in range(8)]
    config = replace(IN_BF16, learning_rate="auto", num_epochs=1)
    metrics = train_reward_model(base, pairs, config, tmp_path, peft_config=lora())
    assert len([name for name in metrics if name.startswith("loss_at_")]) == 3


def test_a_start_that_changes_meanwhile_is_not_merged(base, tmp_path):
    adapted = add_task_adapter(load_policy(base), lora(), "CAUSAL_LM")
    keep_frozen_in_bf16(adapted, Engine(bf16=True))
    assert exact_weights(adapted, base) is not None
    make_policy(seed=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="were changed during the training"):
        exact_weights(adapted, tmp_path)


@pytest.mark.parametrize(
    ("bf16", "sharding", "changes", "expected"),
    [
        (True, "none", {}, {torch.float32, torch.bfloat16}),
        (True, "zero2", {}, {torch.float32, torch.bfloat16}),
        (True, "fsdp2", {}, {torch.float32}),
        (False, "none", {}, {torch.float32}),
        (True, "none", {"use_dora": True}, {torch.float32}),
        (True, "none", {"layer_replication": [(0, 2), (1, 2)]}, {torch.float32}),
    ],
)
def test_frozen_matrices_keep_their_precision_where_it_counts(bf16, sharding, changes, expected):
    adapted = add_task_adapter(make_policy(), lora(**changes), "CAUSAL_LM")
    engine = Engine(bf16=bf16)
    engine.sharding = sharding
    keep_frozen_in_bf16(adapted, engine)
    assert {parameter.dtype for parameter in adapted.parameters()} == expected
    assert adapted.get_output_embeddings().weight.dtype == torch.float32


def test_a_layer_that_is_trained_as_a_copy_is_merged_and_saved(base, tmp_path):
    train_sft(base, EXAMPLES, IN_BF16, tmp_path, peft_config=lora(modules_to_save=["down_proj"]))
    changed = moved(load_policy(base), load_policy(tmp_path))
    assert any("down_proj" in name for name in changed)


def test_the_peft_config_is_left_as_it_was():
    config = lora()
    add_task_adapter(make_policy(), config, "CAUSAL_LM")
    assert config.task_type is None
    assert config.base_model_name_or_path is None


# --- Refused input ---------------------------------------------------------------


def test_a_peft_model_together_with_a_peft_config_is_refused():
    once = add_task_adapter(make_policy(), lora(), "CAUSAL_LM")
    with pytest.raises(ModelError, match="adapter already"):
        add_task_adapter(once, lora(), "CAUSAL_LM")


def test_a_model_that_is_loaded_with_an_adapter_is_refused_by_its_path(sft):
    model = make_policy()
    model.load_adapter(str(sft / "adapter"))
    with pytest.raises(ModelError, match=r"'FOLDER' is a PEFT model.* Merge the adapter"):
        require_plain(model, "FOLDER")


@pytest.mark.parametrize("peft_config", [None, lora()])
def test_a_folder_of_an_adapter_is_refused_with_and_without_a_peft_config(sft, peft_config):
    for train, rows in ((train_sft, EXAMPLES), (train_reward_model, PAIRS)):
        with pytest.raises(ModelError, match=r"adapter' is a PEFT model.* Merge the adapter"):
            train(sft / "adapter", rows, CONFIG, sft / "again", peft_config=peft_config)


def test_adapters_for_another_task_are_refused(base, tmp_path):
    with pytest.raises(ConfigError, match=r"CAUSAL_LM.* must be 'SEQ_CLS'"):
        train_reward_model(
            base, PAIRS, CONFIG, tmp_path / "rm", peft_config=lora(task_type="CAUSAL_LM")
        )


@pytest.mark.parametrize(
    "config", [PromptTuningConfig(num_virtual_tokens=2), lora(target_modules=["no_such_layer"])]
)
def test_adapters_that_cannot_be_put_on_or_merged_are_refused_before_training(
    base, tmp_path, config
):
    with pytest.raises(ModelError):
        train_sft(base, EXAMPLES, CONFIG, tmp_path / "sft", peft_config=config)
    assert not any((tmp_path / "sft").iterdir())
