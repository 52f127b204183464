"""Settings of a wrong type or out of range are refused by name, before anything is loaded."""

import enum
import re
from dataclasses import dataclass
from decimal import Decimal
from math import inf, nan
from typing import Any, Literal

import numpy as np
import pytest
import torch

from ppo_core.config.field_checks import check_fields
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.io.validation import Count, PositiveOrInf, Share
from ppo_core.supervised.supervised_config import SupervisedConfig
from ppo_core.trl.classic.classic_config import ClassicPPOConfig

WRONG: list[tuple[type, dict[str, Any], str]] = [
    (SupervisedConfig, {"weight_decay": "0.1"}, "weight_decay='0.1' must be a number."),
    (SupervisedConfig, {"weight_decay": None}, "weight_decay=None must be a number."),
    (SupervisedConfig, {"num_epochs": True}, "num_epochs=True must be a whole number."),
    (SupervisedConfig, {"end_of_text": "no"}, "end_of_text='no' must be True or False."),
    (SupervisedConfig, {"sharding": "zero4"}, "sharding='zero4' must be one of none, ddp, zero1,"),
    (SupervisedConfig, {"warmup_ratio": 1.0}, "warmup_ratio=1.0 must be at least 0 and below 1."),
    (SupervisedConfig, {"save_steps": 1.5}, "save_steps=1.5 must be a whole number, or a fraction"),
    (SupervisedConfig, {"learning_rate": "fast"}, "learning_rate='fast' must be above 0, or auto."),
    (SupervisedConfig, {"learning_rate": True}, "learning_rate=True must be above 0, or auto."),
    (SupervisedConfig, {"learning_rate": inf}, "learning_rate=inf must be above 0, or auto."),
    (ClassicPPOConfig, {"target": "6"}, "target='6' must be a number."),
    (ClassicPPOConfig, {"horizon": 0.5}, "horizon=0.5 must be a whole number, at least 1."),
    (ClassicPPOConfig, {"kl_penalty": "k1"}, "kl_penalty='k1' must be one of kl, abs, mse, full."),
    (PPOConfig, {"temperature": nan}, "temperature=nan must be a finite number."),
    (PPOConfig, {"max_grad_norm": nan}, "max_grad_norm=nan must be above 0."),
    (PPOConfig, {"seed": -1}, "seed=-1 must be at least 0 and below 2**32."),
    (PPOConfig, {"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1."),
    (PPOConfig, {"lam_critic": 2.0}, "lam_critic=2.0 must be between 0 and 1."),
    (PPOConfig, {"kl_coef": 2**63}, f"kl_coef={2**63} must be a plain number of at most 64 bits."),
    (PPOConfig, {"gamma": Decimal(1)}, "gamma=Decimal('1') must be a plain number"),
    (PPOConfig, {"gamma": np.float32(1)}, "gamma=np.float32(1.0) must be a plain number"),
    (PPOConfig, {"gamma": torch.tensor(1.0)}, "gamma=tensor(1.) must be a plain number"),
]


@pytest.mark.parametrize(("kind", "wrong", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_value_is_refused_by_name(kind: type, wrong: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        kind(**wrong)


@dataclass(frozen=True)
class Own:
    """Settings with a field of each kind."""

    count: Count | None = None
    share: Share = 0.5
    limit: PositiveOrInf = 1.0
    choice: Literal["a", "b"] = "a"
    text: str = ""


class Word(str, enum.Enum):  # noqa: UP042 - as transformers' own
    """A choice as transformers has them."""

    B = "b"


@pytest.mark.parametrize(
    "given",
    [
        {"share": 1},
        {"share": np.float64(0.25)},
        {"limit": inf},
        {"choice": Word.B},
        {"count": 3},
        # Texts are checked where they are read from a file: a script may give a path.
        {"text": 3},
    ],
    ids=str,
)
def test_a_value_that_stands_for_one_of_its_type_is_accepted_as_it_is(given: dict[str, Any]):
    settings = Own(**given)
    check_fields(settings)
    assert {name: getattr(settings, name) for name in given} == given


@dataclass(frozen=True, kw_only=True)
class Subclass(PPOConfig):
    """A script's settings, with a type that only its editor knows."""

    model: "Model" = None  # type: ignore[name-defined]  # noqa: F821


def test_a_subclass_of_the_settings_is_checked_as_they_are():
    assert Subclass(model=3).model == 3
    with pytest.raises(ConfigError, match="lam=2 must be"):
        Subclass(lam=2)
