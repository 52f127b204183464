"""Defaults by the size of a model."""

from dataclasses import asdict
from itertools import pairwise

import pytest

from ppo_core.config.sized_defaults import LORA_FACTOR, sized_defaults

RATES = ("sft_learning_rate", "reward_learning_rate", "ppo_learning_rate")


@pytest.mark.parametrize(
    ("parameters", "ppo_rate", "passes"),
    [
        (0, 5e-4, (16, 1)),
        (3_000_000, 5e-4, (16, 1)),
        (3_000_001, 1e-4, (16, 2)),
        # GPT-2, Qwen2.5-0.5B, Pythia-1B and Llama-3.1-8B.
        (124_439_808, 1.41e-5, (16, 2)),
        (494_032_768, 3e-6, (8, 4)),
        (1_011_781_632, 3e-6, (8, 4)),
        (8_030_261_248, 1e-6, (2, 16)),
        (70_000_000_000, 1e-6, (2, 16)),
    ],
)
def test_the_size_decides(parameters, ppo_rate, passes):
    found = sized_defaults(parameters, lora=False)
    assert found.ppo_learning_rate == ppo_rate
    assert (found.batch_size, found.gradient_accumulation_steps) == passes


def test_adapters_take_ten_times_the_rates_and_nothing_else():
    for parameters in (10**6, 10**9, 10**10):
        full, lora = (asdict(sized_defaults(parameters, lora=one)) for one in (False, True))
        assert {name: lora[name] / full[name] for name in RATES} == pytest.approx(
            dict.fromkeys(RATES, LORA_FACTOR)
        )
        assert all(lora[name] == full[name] for name in full if name not in RATES)


def test_no_larger_model_has_a_higher_rate_and_every_batch_can_be_split():
    rows = [sized_defaults(10**power, lora=False) for power in range(5, 12)]
    for smaller, larger in pairwise(rows):
        assert all(getattr(larger, name) <= getattr(smaller, name) for name in RATES)
    for row in rows:
        assert row.ppo_batch_size % row.ppo_device_batch_size == 0
