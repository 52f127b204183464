"""The loss of SFT by PPO's passes, against transformers' forward pass and cross entropy."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    LlamaForCausalLM,
    PreTrainedConfig,
)

from ppo_core.models.adapters import add_adapter, lora_config
from ppo_core.supervised.examples.sft_examples import collate_examples
from ppo_core.supervised.next_token_loss import NextTokenLoss
from ppo_core.supervised.training_loop import set_mode
from tests.helpers.models.tiny import VOCABULARY, make_policy
from tests.ppo_core.models.kernels.test_decoder_forward import PLAIN

OTHERS: dict[str, PreTrainedConfig] = {
    "bloom": BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2),
    "gemma2 with capped logits": Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=None,
    ),
}
EXAMPLES = [
    {"input_ids": [3, 4, 5, 6, 7, 8], "labels": [-100, -100, 5, 6, -100, 8]},
    {"input_ids": [6, 9, 1], "labels": [-100, 9, 1]},
    {"input_ids": [4, 1], "labels": [4, 1]},
]
WEIGHTS = torch.tensor([0.5, 2.0, 0.0])


class Shifted(LlamaForCausalLM):
    """A model whose logits are no product of a matrix and hidden states."""

    def forward(self, *args, **inputs):
        output = super().forward(*args, **inputs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1])
        return output


def expected_loss(model: torch.nn.Module) -> torch.Tensor:
    """Return the weighted loss, by one unpadded forward pass for each example."""
    total = torch.zeros((), dtype=model.dtype)
    for example, weight in zip(EXAMPLES, WEIGHTS, strict=True):
        logits = model(input_ids=torch.tensor([example["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(example["labels"][1:])
        total = total + weight * cross_entropy(logits, labels, reduction="sum")
    return total


def assert_same(objective: NextTokenLoss, model: torch.nn.Module) -> None:
    loss, _ = objective(**collate_examples(EXAMPLES), weights=WEIGHTS)
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    expected = expected_loss(model)
    expected.backward()
    assert_close(loss, expected.to(loss.dtype), rtol=0, atol=1e-4)
    for ours, parameter in zip(found, model.parameters(), strict=True):
        assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_loss_and_gradients_are_those_of_cross_entropy_on_each_example_alone(name, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config({**PLAIN, **OTHERS}[name]).eval().to(dtype)
    objective = NextTokenLoss(model)
    assert objective.backbone is not None
    assert (objective.backbone.fast_layers() is None) == (name in OTHERS)
    assert_same(objective, model)


def test_a_model_with_other_logits_trains_by_its_own_forward_pass():
    torch.manual_seed(0)
    model = Shifted(PLAIN["llama"]).eval()
    objective = NextTokenLoss(model)
    assert objective.backbone is None
    assert_same(objective, model)


def test_parameters_keep_the_names_that_checkpoints_have():
    model = make_policy()
    names = [name for name, _ in NextTokenLoss(model).named_parameters()]
    assert names == [f"model.{name}" for name, _ in model.named_parameters()]


def test_dropout_of_adapters_acts_on_the_fast_path():
    adapted = add_adapter(make_policy(), lora_config(target_modules=["q_proj"], lora_dropout=0.5))
    objective = NextTokenLoss(adapted)
    set_mode(objective, adapted, recomputes=False)
    assert objective.backbone.fast_layers() is not None
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    losses = {objective(**collate_examples(EXAMPLES), weights=WEIGHTS)[0].item() for _ in range(3)}
    assert len(losses) == 3


def test_a_model_with_dropout_of_its_own_trains_with_it():
    model = make_policy()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    objective = NextTokenLoss(model)
    set_mode(objective, None, recomputes=False)
    assert objective.backbone.fast_layers() is None
    losses = {objective(**collate_examples(EXAMPLES), weights=WEIGHTS)[0].item() for _ in range(3)}
    assert len(losses) == 3
