"""The running mean of the weights."""

import pytest
import torch
from torch import nn, tensor
from torch.testing import assert_close

from ppo_core.errors import TrainingError
from ppo_core.ppo.ema import WeightAverage
from tests.helpers.models.tiny import make_policy


def linear(*weights: float, dtype=torch.float32) -> nn.Linear:
    layer = nn.Linear(len(weights), 1, bias=False, dtype=dtype)
    set_weights(layer, *weights)
    return layer


def set_weights(layer: nn.Linear, *weights: float) -> None:
    with torch.no_grad():
        layer.weight.copy_(tensor([weights]))


def test_the_mean_by_hand():
    # 0.75 * 8 + 0.25 * 4 = 7;   0.75 * 7 + 0.25 * -1 = 5
    layer = linear(8.0)
    average = WeightAverage(layer, 0.75)
    assert average.tensors()["weight"].item() == 8.0
    set_weights(layer, 4.0)
    average.update()
    assert average.tensors()["weight"].item() == 7.0
    set_weights(layer, -1.0)
    average.update()
    assert average.tensors()["weight"].item() == 5.0
    assert layer.weight.item() == -1.0


def test_the_mean_of_half_precision_weights_is_finer_than_they_are():
    # bfloat16 has no number between 1 and 1.0078: a mean kept in it would never move.
    layer = linear(1.0, dtype=torch.bfloat16)
    average = WeightAverage(layer, 0.99)
    set_weights(layer, 1.0078125)
    for _ in range(10):
        average.update()
    mean = average.tensors()["weight"]
    assert mean.dtype == torch.float32
    assert_close(mean, tensor([[1 + 0.0078125 * (1 - 0.99**10)]]), rtol=1e-6, atol=0)


def test_frozen_weights_have_no_mean():
    model = nn.Sequential(linear(1.0), linear(2.0))
    model[0].weight.requires_grad_(False)
    average = WeightAverage(model, 0.5)
    assert list(average.tensors()) == ["1.weight"]
    with average.swapped_in():
        assert model[0].weight.item() == 1.0


def test_the_model_has_the_mean_inside_and_its_own_weights_to_the_bit_afterwards():
    model = make_policy()
    average = WeightAverage(model, 0.5)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    average.update()
    last = {name: p.detach().clone() for name, p in model.named_parameters()}
    with average.swapped_in():
        for name, parameter in model.named_parameters():
            assert_close(parameter.detach(), (first[name] + last[name]) / 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, last[name])
        assert parameter.requires_grad


def test_the_models_own_weights_come_back_after_an_exception():
    layer = linear(8.0)
    average = WeightAverage(layer, 0.75)
    set_weights(layer, 4.0)
    with pytest.raises(ZeroDivisionError), average.swapped_in():
        assert layer.weight.item() == 8.0
        raise ZeroDivisionError
    assert layer.weight.item() == 4.0


def test_what_the_model_does_inside_leaves_the_mean_alone():
    layer = linear(8.0)
    average = WeightAverage(layer, 0.75)
    with average.swapped_in():
        set_weights(layer, 100.0)
    assert average.tensors()["weight"].item() == 8.0


def test_a_loaded_mean_goes_on_as_the_saved_one():
    saved, fresh = linear(8.0), linear(0.0)
    average, resumed = WeightAverage(saved, 0.9), WeightAverage(fresh, 0.9)
    resumed.load({name: mean.clone() for name, mean in average.tensors().items()})
    for weight in (3.0, 0.1):
        set_weights(saved, weight)
        set_weights(fresh, weight)
        average.update()
        resumed.update()
    assert torch.equal(average.tensors()["weight"], resumed.tensors()["weight"])


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (
            {"weight": torch.zeros(1, 3)},
            r"'weight' has the shape \(1, 3\) in the checkpoint, but \(1, 1\)",
        ),
        ({}, r"'weight' has the shape None in the checkpoint"),
        ({"weight": torch.zeros(1, 1), "x": torch.zeros(1)}, r"'x' has .* None in the policy"),
    ],
    ids=["shape", "missing", "unknown"],
)
def test_the_mean_of_another_model_is_refused(tensors, words):
    average = WeightAverage(linear(8.0), 0.9)
    with pytest.raises(TrainingError, match=words):
        average.load(tensors)
    assert average.tensors()["weight"].item() == 8.0
