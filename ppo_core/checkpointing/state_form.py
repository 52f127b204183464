"""The form that the JSON files of a checkpoint must have, so that a run can resume from it.

Keys that later versions of this library have added are not required. Metrics may be NaN: training
continues after a batch with a score that is not finite. Numbers that training uses must be finite.
"""

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, JsonValue

from ppo_core.checkpointing.folders import STATE
from ppo_core.io.validation import Finite, Natural


def _require_finite(value: JsonValue) -> JsonValue:
    left = [value]
    while left:
        match left.pop():
            case float(number) if not math.isfinite(number):
                raise ValueError("without NaN and infinity")
            case dict(inner):
                left.extend(inner.values())
            case list(inner):
                left.extend(inner)
    return value


_FiniteJson = Annotated[JsonValue, AfterValidator(_require_finite)]


class _WithFiniteNumbers(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, _FiniteJson]


class _Schedule(_WithFiniteNumbers):
    last_epoch: Natural
    base_lrs: list[Finite] = []


class _ParameterGroup(_WithFiniteNumbers):
    lr: Finite


class _Optimizer(BaseModel):
    kind: str
    groups: list[_ParameterGroup]


class _Identity(BaseModel):
    settings: dict[str, Any]
    models: dict[str, dict[str, str]]


class _Training(BaseModel):
    """The entries of trainer_state.json that every training has."""

    step: Natural
    processes: Natural
    identity: _Identity
    optimizer: _Optimizer
    kept: dict[str, list[str]]
    scheduler: _Schedule


class _Texts(BaseModel):
    texts: Natural
    position: Natural
    generator: list[Natural]


class _Moments(BaseModel):
    count: Finite
    mean: Finite
    squares: Finite


class _AdaptiveKl(BaseModel):
    kl_coef: Finite
    mean: Annotated[Finite | None, Field(default=None)]


class _RewardDrop(BaseModel):
    recent: list[Finite]
    best: Finite | None
    changes: Finite
    updates: Natural


class _Health(BaseModel):
    in_a_row: dict[str, Natural]
    first: dict[str, float]
    warned: list[str]
    drop: Annotated[_RewardDrop, Field(default=None)]
    skipped: float = 0.0


class _EarlyHealth(BaseModel):
    in_a_row: dict[str, Natural]
    first_length: float | None


class _Pending(BaseModel):
    values: dict[str, float | None]
    metrics: dict[str, float]
    steps_done: Natural
    sums: dict[str, float]


class _Run(BaseModel):
    updates: Natural
    episodes: Natural
    moments: _Moments
    reward_moments: Annotated[dict[str, _Moments] | None, Field(default=None)]
    adaptive_kl: _AdaptiveKl | None
    health: _Health | _EarlyHealth
    pending: _Pending | None
    critic_fit_is_over: bool = False


class _LogEntry(BaseModel, extra="allow"):
    __pydantic_extra__: dict[str, JsonValue]
    step: Natural


class _Reporter(BaseModel):
    global_step: Natural
    epoch: Finite | None
    best_metric: float | None
    best_global_step: Natural | None
    log_history: list[_LogEntry]
    stateful_callbacks: dict[str, Any]


class _PPO(_Training):
    skipped_steps: Natural
    skipped_in_a_row: Natural
    pretraining: _Texts | None
    groups: list[str]
    run: _Run
    reporter: _Reporter


class _Progress(BaseModel):
    steps: Natural
    tail: float
    line: list[float]


class _Supervised(_Training):
    progress: _Progress


class _RandomStates(BaseModel):
    python: tuple[int, list[Natural], float | None]
    numpy: tuple[str, int, int, float]


_PROCESSES = {r"process-\d+\.json": _RandomStates}

FORMS = {
    re.escape(STATE): _PPO,
    **_PROCESSES,
    r"(adapter_|generation_)?config\.json": dict[str, Any],
}
"""Forms of the JSON files of a PPO checkpoint."""

SUPERVISED_FORMS = {re.escape(STATE): _Supervised, **_PROCESSES}
"""Forms of the JSON files of a checkpoint of supervised training."""
