"""Limits that a reward model must meet before PPO, and a policy before its promotion."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated

from pydantic import Field

from ppo_core.config.field_checks import check_fields, is_finite
from ppo_core.config.spelling import nearest_name
from ppo_core.errors import ConfigError
from ppo_core.io.validation import (
    Count,
    ErrorRate,
    NotNegative,
    Positive,
    PositiveOrInf,
    Share,
    ShareAbove0,
    ShareBelow1,
)


@dataclass(frozen=True, kw_only=True)
class RewardGateConfig:
    """Samples for validating the reward model, and the limits of its gate.

    Raises:
        ConfigError: a value is out of range.
    """

    min_best_of_4: Share = 0.5
    """Fraction of prompts for which the judge must prefer the reward model's best of four samples
    to another sample. The lower end of the 95 % interval must exceed this limit."""

    min_accuracy: Share = 0.55
    """Accuracy on held-out pairs that the lower end of the 95 % interval must reach. If the judge
    has compared samples (`min_best_of_4`), a lower accuracy only causes a warning."""

    max_calibration_error: Share = 0.3
    """Maximum expected calibration error of sigmoid(margin) for an overconfident model. The limit
    does not apply to an underconfident model, because its rewards are small but not wrong."""

    max_length_correlation: Share = 0.8
    """Maximum absolute Spearman correlation of a response's score with its length in characters."""

    min_shorter_accuracy: Share = 0.25
    """Accuracy on pairs in which people prefer the shorter response. The upper end of the 95 %
    interval must reach this limit."""

    min_sample_deviation: NotNegative = 0.05
    """Minimum standard deviation of the scores of the SFT policy's samples."""

    max_degenerate_preferred: Share = 0.6
    """Maximum fraction of references for which a degenerate version scores above the texts that it
    is compared with. A model without any preference has 33 to 50 %. The lower end of the 95 %
    interval must not exceed this maximum."""

    tolerance: Positive = 1e-3
    """A text is scored alone, in a batch, and with padding on either side. Its scores may differ by
    at most this fraction of the standard deviation of the held-out scores."""

    num_prompts: Count = 64
    """Number of prompts for which the SFT policy is sampled; the first prompts are used."""

    max_prompts: Count = 256
    """Maximum number of prompts whose samples the judge compares. After `num_prompts` prompts, more
    prompts are sampled only until it is clear whether `min_best_of_4` is exceeded."""

    samples_per_prompt: Annotated[int, Field(ge=5)] = 8
    """Number of samples per prompt, and the largest K of the best-of-K curve. The best of four
    samples is compared with a fifth sample."""

    unit_deviation: bool = False
    """Whether to scale the reward so that the SFT policy's samples have standard deviation 1."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        check_fields(self)


BUILT_IN_GUARDS = {
    "stops": "stop within response_length",
    "has_text": "are not empty",
    "answers": "do not refuse the prompt",
    "refuses": "refuse the prompt",
    "language": "have the language of the prompt",
    "format": "match the format",
}
"""Built-in guard -> which answers it counts."""

_GUARD_NAME = re.compile(r"[A-Za-z]\w{0,49}", re.ASCII)

_TASK_NAME = re.compile(r"[\w-]{1,100}", re.ASCII)


def is_task_file(task: str) -> bool:
    """Return whether a task is the path of a task file, not a name of lm-evaluation-harness."""
    return task.endswith((".yaml", ".yml"))


def name_of_task(task: str) -> str:
    """Return the name of a task's guard: the task itself, or its file name without the ending."""
    return PurePath(task).stem if is_task_file(task) else task


@dataclass(frozen=True, kw_only=True)
class GuardsConfig:
    """Properties of the answers in which a policy must not be worse than the champion.

    Raises:
        ConfigError: a name is unknown, or a value is out of range.
    """

    margin: ShareAbove0 = 0.05
    """Largest loss against the champion (SFT if there is no champion) that is harmless, as a
    fraction of the answers. A policy is refused if it is shown to be worse than the champion and
    its loss may exceed this margin."""

    margins: dict[str, float] = field(default_factory=dict)
    """Margins of single guards, by name, which replace `margin`."""

    off: list[str] = field(default_factory=list)
    """Built-in guards that are not applied: stops, has_text, answers, refuses, language."""

    format: str = ""
    """Regular expression for a whole answer, not counting the spaces around the answer; the guard
    `format` counts the answers that match. If empty, there is no such guard."""

    functions: dict[str, str] = field(default_factory=dict)
    """Guards of your own, by name: python:FILE_OR_MODULE:FUNCTION, a function of prompts and
    responses that returns a number in [0, 1] for each response: 1 if the response is right."""

    tasks: dict[str, int] = field(default_factory=dict)
    """Tasks of lm-evaluation-harness on which the policy must not lose, with the maximum number of
    documents of each task. A task is a name of the package lm_eval, or the path of a task file that
    ends in .yaml; the name of its guard is the name of the file without the ending."""

    def __post_init__(self) -> None:
        """Raise if a name is unknown or a value is out of range."""
        check_fields(self)
        _require_known("off", self.off, [name for name in BUILT_IN_GUARDS if name != "format"])
        for name, source in self.functions.items():
            if not _GUARD_NAME.fullmatch(name) or name in BUILT_IN_GUARDS:
                raise ConfigError(
                    f"functions.{name:.80} is not a name of a guard: a name has at most 50 "
                    "letters, digits and underscores, begins with a letter, and is none of "
                    f"{', '.join(BUILT_IN_GUARDS)}."
                )
            if not re.fullmatch(r"python:.+:.+", source):
                raise ConfigError(
                    f"functions.{name}={source!r:.80} must be python:FILE_OR_MODULE:FUNCTION."
                )
        self._check_tasks()
        _require_known("margins", self.margins, self.names)
        for name, margin in self.margins.items():
            if not (is_finite(margin) and 0 < margin <= 1):
                raise ConfigError(f"margins.{name}={margin!r:.80} must be above 0 and at most 1.")
        try:
            re.compile(self.format)
        # RecursionError and OverflowError: a group is nested too deeply, or repeated too often.
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"format={self.format!r:.80} is not a regular expression: {error}."
            ) from error

    def _check_tasks(self) -> None:
        taken = {*BUILT_IN_GUARDS, *self.functions}
        for task, limit in self.tasks.items():
            if not (is_finite(limit) and isinstance(limit, int) and limit >= 1):
                raise ConfigError(
                    f"tasks.{task:.80}={limit!r:.80} must be a whole number, at least 1."
                )
            name = name_of_task(task)
            if not _TASK_NAME.fullmatch(name):
                raise ConfigError(
                    f"tasks.{task:.80} is not a name of a task: a name has at most 100 letters, "
                    "digits, underscores and hyphens, and the path of a task file ends in .yaml."
                )
            if name in taken:
                raise ConfigError(
                    f"tasks.{task:.80}: another guard has the name {name}, so a margin would "
                    "belong to two guards. Rename the function, or the file of the task."
                )
            taken.add(name)

    @property
    def applied(self) -> list[str]:
        """Names of the built-in guards that are applied."""
        left_out = {*self.off, *([] if self.format else ["format"])}
        return [name for name in BUILT_IN_GUARDS if name not in left_out]

    @property
    def names(self) -> list[str]:
        """Names of all guards that are applied."""
        return [*self.applied, *self.functions, *map(name_of_task, self.tasks)]

    def margin_of(self, name: str) -> float:
        """Return the margin of a guard."""
        return self.margins.get(name, self.margin)


def _require_known(setting: str, given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            near = nearest_name(name, known)
            hint = f" Did you mean {near}?" if near else ""
            raise ConfigError(
                f"{setting} names {name!r:.80}, which is not a guard of this run.{hint} The guards "
                f"are {', '.join(known)}."
            )


ALPHA = 0.001
"""Default of `alpha`."""

GAIN = 0.05
"""The default of `min_gain` is this much above the win rate that the policy must exceed."""


@dataclass(frozen=True, kw_only=True)
class PromotionConfig:
    """Limits of the promotion gate.

    The limit of invalid verdicts is `max_invalid` of the evaluation. An evaluation above this limit
    is inconclusive, and an inconclusive evaluation never promotes a policy.

    Raises:
        ConfigError: a value is out of range.
    """

    min_win_rate: ShareBelow1 = 0.5
    """Win rate against the champion (SFT if there is no champion) that the policy must exceed."""

    min_reference_win_rate: ShareBelow1 = 0.5
    """Win rate against the references that the policy must exceed."""

    alpha: ErrorRate = ALPHA
    """Largest probability of promoting a policy that does not exceed `min_win_rate`. Judging ends
    in three cases: the policy is shown to exceed this rate; a rate of `min_gain` is implausible;
    or all prompts are judged."""

    false_promotion_rate: ErrorRate | None = None
    """Largest expected fraction of false promotions among all promotions of the registered model.
    If set, the alpha of each decision follows from the number of earlier decisions and promotions,
    and `alpha` must be left out."""

    min_gain: ShareBelow1 | None = None
    """Win rate that is worth a promotion: the judge is asked no more once the rate is shown to be
    lower. None: 0.05 above the win rate that the policy must exceed, but at most halfway from that
    rate to 1."""

    max_kl: PositiveOrInf = 20.0
    """Maximum KL divergence from SFT in nats per answer. Above 10 to 20 nats, the policy usually
    exploits the reward model; see docs/metrics.md."""

    max_length_ratio: Annotated[float, Field(ge=1, allow_inf_nan=True)] = 2.0
    """Maximum ratio of the mean answer lengths of the policy and of the champion (SFT if there is
    no champion), in words: the longer length divided by the shorter length."""

    max_repetition: Share = 0.3
    """Maximum fraction of an answer's 3-grams of words that repeat an earlier 3-gram of the answer,
    as a mean over the answers; equal answers count once."""

    guards: GuardsConfig = field(default_factory=GuardsConfig)
    """Properties of the answers in which the policy must not be worse than the champion."""

    withdraw_alpha: ErrorRate | None = None
    """If set, the flow Retrain first compares users' feedback on the champion with users' feedback
    on the previous champion, and withdraws the champion if the feedback shows that it is worse.
    The value is the largest probability of withdrawing a champion that is not worse. See
    docs/feedback.md."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range, or contradicts another value."""
        check_fields(self)
        if self.false_promotion_rate is not None and self.alpha != ALPHA:
            raise ConfigError(
                f"alpha={self.alpha:g} would be ignored, because the alpha of each decision "
                f"follows from false_promotion_rate={self.false_promotion_rate:g}. Remove one "
                "of them."
            )
        for name in ("min_win_rate", "min_reference_win_rate"):
            least = getattr(self, name)
            if self.min_gain is not None and self.min_gain <= least:
                raise ConfigError(
                    f"min_gain={self.min_gain:g} is not above {name}={least:g}, so judging could "
                    f"end early although the policy exceeds {name}. Raise min_gain, or leave it "
                    "out."
                )

    def gain_above(self, least: float) -> float:
        """Return the win rate that is worth a promotion if `least` must be exceeded."""
        if self.min_gain is None:
            return least + min(GAIN, (1 - least) / 2)
        return self.min_gain
