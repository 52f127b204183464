"""The loss of SFT by PPO's passes, against transformers' forward pass and cross entropy."""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
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
    """A model whose logits are not the product of a matrix and hidden states."""

    def forward(self, *args, **inputs):
        output = super().forward(*args, **inputs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1])
        return output


def expected_loss(
    model: PreTrainedModel, examples: list[Any], weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted loss, by one unpadded forward pass for each example."""
    total = torch.zeros((), dtype=model.dtype, device=model.device)
    for example, weight in zip(examples, weights.tolist(), strict=True):
        ids, labels = (torch.tensor(part, device=model.device) for part in example.values())
        logits = model(input_ids=ids[None]).logits[0, :-1]
        total = total + weight * cross_entropy(logits, labels[1:], reduction="sum")
    return total


def assert_same(
    objective: NextTokenLoss,
    model: PreTrainedModel,
    examples: list[Any] = EXAMPLES,
    weights: torch.Tensor = WEIGHTS,
) -> None:
    batch = {**collate_examples(examples), "weights": weights}
    loss, _ = objective(**{name: tensor.to(model.device) for name, tensor in batch.items()})
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    expected = expected_loss(model, examples, weights)
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


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        made = function(*args, **kwargs or {})
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.untyped_storage().nbytes() // one.itemsize)
        return made


def long_example(length: int) -> dict[str, list[int]]:
    """Return an example of 4 prompt tokens and a long response."""
    ids = [3 + n * n % 50 for n in range(length)]
    return {"input_ids": ids, "labels": [-100] * 4 + ids[4:]}


def long_model() -> LlamaForCausalLM:
    """Return a model for long texts whose query heads share keys."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16_384,
    )
    return LlamaForCausalLM(config).eval()


def test_the_loss_of_long_texts_is_that_of_each_text_alone():
    model = long_model()
    weights = torch.tensor([1 / 300, 0.25])
    assert_same(NextTokenLoss(model), model, [long_example(300), EXAMPLES[0]], weights)


@pytest.mark.parametrize("length", [300, 600])
def test_no_tensor_of_a_long_text_grows_with_the_square_of_its_length(length):
    objective = NextTokenLoss(long_model())
    batch = collate_examples([long_example(length)])
    with LargestTensor() as largest:
        objective(**batch, weights=torch.ones(1))[0].backward()
    # The activations of the MLP are the largest; a mask would have length**2 elements.
    assert largest.numel == length * 64


def test_parameters_keep_the_names_that_checkpoints_have():
    model = make_policy()
    names = [name for name, _ in NextTokenLoss(model).named_parameters()]
    assert names == [f"model.{name}" for name, _ in model.named_parameters()]


def test_no_module_is_registered_twice():
    # DeepSpeed adds its hooks for each name of a module.
    objective = NextTokenLoss(make_policy())
    assert len([*objective.named_modules(remove_duplicate=False)]) == len([*objective.modules()])


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
