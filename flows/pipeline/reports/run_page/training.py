"""Make the sections with the curves of the trainings."""

import math
import re

from pipeline.reports.document import Chart, Curve, Section, as_number
from pipeline.reports.run_page.facts import EPISODE, Curves, RunFacts
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.reporting.health import GUARDS
from ppo_core.reporting.metrics_file import SPREAD

TITLE = "How did PPO go? Scores, KL and other curves"

STOPPED = "share of stopped responses"
"""Name of a curve that `_stopped` computes from two metrics."""

PPO_CURVES = {
    "objective/scores": "Score of a response",
    "objective/rlhf_reward": "Score less the KL penalty",
    "objective/kl": "KL from SFT, nats",
    "policy/entropy_avg": "Entropy of the next token, nats",
    "val/ratio": "Probability ratio",
    "policy/clipfrac_avg": "Clipped tokens of the policy",
    "policy/approxkl_avg": "Change within an update",
    "loss/policy_avg": "Policy loss",
    "loss/value_avg": "Value loss",
    "val/explained_variance": "Explained variance of the critic",
    "val/response_length": "Tokens of a response",
    STOPPED: "Responses that ended with a stop token",
    "val/repetition": "Repeated 3-grams",
    "eval/scores": "Score of greedy answers to evaluation prompts",
}
"""Metric of PPO -> title of its curve, in the order of the page."""

LIMITS = {
    "policy/approxkl_avg": (0.0, 0.1),
    "policy/clipfrac_avg": (0.0, 0.3),
    "val/explained_variance": (0.0, 1.0),
}
"""Metric -> healthy range in docs/metrics.md. If PPO warns at a limit of the metric, this limit
replaces one end of the range."""

DrawableCurves = dict[str, list[tuple[int, float]]]
"""Name of a metric -> its values (update, value), all of which a chart can show."""

MOST = 1e100
"""A chart leaves out NaN and values whose absolute value is at least MOST: no chart has room for
them."""

REWARDS = "rewards/"
"""Prefix of PPO's metrics of single rewards."""

SUPERVISED = ("loss", "accuracy", "margin")
"""Metrics of supervised trainings that are shown as curves, by the last parts of their names."""


def ppo_section(facts: RunFacts) -> Section:
    """Return the curves of PPO, with the healthy range and the warnings of each metric."""
    curves = _drawable(facts.curves)
    if EPISODE not in curves:
        none = "PPO has not finished an update yet." if facts.is_running else "PPO did not run."
        return Section(title=TITLE, text=(none,))
    curves |= _drawable({STOPPED: _stopped(curves)})
    rewards = [name for name in curves if name.startswith(REWARDS)]
    titles = PPO_CURVES | ({name: name for name in rewards} if len(rewards) > 1 else {})
    told = facts.warnings or ["PPO gave no warning."]
    return Section(
        title=TITLE,
        text=(
            "Each curve has its last value in its caption. The green area is the healthy range, "
            "the blue area has the middle 80 % of the responses, and a dashed line marks an update "
            "with a warning. docs/metrics.md explains each metric.",
            *told,
        ),
        charts=tuple(
            _ppo_chart(facts, name, title, curves)
            for name, title in titles.items()
            if name in curves
        ),
    )


def supervised_section(facts: RunFacts) -> Section:
    """Return the curves of SFT, of the reward model and of a judge that the run trained."""
    charts = tuple(
        Chart(title=name, caption=_ends(points), data=Curve(points=tuple(points)))
        for name, points in _drawable(facts.curves).items()
        if name.rpartition("/")[2] in SUPERVISED and not name.startswith(REWARDS)
    )
    none = ("No curve: the run was given these models, or reused models of an earlier run.",)
    if facts.is_running:
        none = ("No curve yet. Models that are given or reused have none.",)
    title = "How did the training of SFT and of the reward model go?"
    return Section(title=title, text=() if charts else none, charts=charts)


def healthy_range(config: PPOConfig, metric: str, first: float) -> tuple[float, float]:
    """Return the healthy range of a metric of PPO, from LIMITS and the limits of the warnings.

    Args:
        config: settings of PPO, with the limits of the warnings.
        metric: name of the metric.
        first: value of the metric in the first update.
    """
    low, high = LIMITS.get(metric, (-math.inf, math.inf))
    for guard in GUARDS.values():
        if guard.metric == metric and guard.side == "below":
            low = guard.limit(config, first)
        elif guard.metric == metric:
            high = guard.limit(config, first)
    return low, high


def _ppo_chart(facts: RunFacts, name: str, title: str, curves: DrawableCurves) -> Chart:
    points, spread = curves[name], _spread(curves, name)
    low, high = healthy_range(facts.settings.ppo, name, points[0][1])
    caption, last = _ends(points), points[-1][1]
    if spread:
        caption += " Blue area: the middle 80 % of the responses."
    if math.isfinite(low) or math.isfinite(high):
        caption += f" Healthy: {_in_words(low, high)}."
        if not low <= last <= high:
            caption += " The last value is outside."
    marks = tuple(update for update, metric in map(_warned, facts.warnings) if metric == name)
    if marks:
        caption += f" Warned in update {', '.join(map(str, marks))}."
    curve = Curve(points=tuple(points), healthy=(low, high), marks=marks, spread=spread)
    return Chart(title=title, caption=f"{name}: {caption}", data=curve)


def _spread(curves: DrawableCurves, name: str) -> tuple[tuple[int, float, float], ...]:
    """Return (update, 10 % quantile, 90 % quantile) of a metric that has quantiles."""
    lows, highs = (dict(curves.get(f"{name}_{end}", [])) for end in SPREAD)
    return tuple((update, low, highs[update]) for update, low in lows.items() if update in highs)


def _drawable(curves: Curves) -> DrawableCurves:
    """Return the curves that have values, without values that no chart can show."""
    found = {
        name: [(step, value) for step, value in points if abs(value) < MOST]
        for name, points in curves.items()
    }
    return {name: points for name, points in found.items() if points}


def _ends(points: list[tuple[int, float]]) -> str:
    # A tiny value, such as the first divergence, is a rounding error of 0.
    first, last = (0.0 if abs(value) < 1e-6 else value for _, value in (points[0], points[-1]))
    return f"from {as_number(first)} to {as_number(last)}."


def _in_words(low: float, high: float) -> str:
    if math.isinf(low):
        return f"at most {as_number(high)}"
    if math.isinf(high):
        return f"at least {as_number(low)}"
    return f"{as_number(low)} to {as_number(high)}"


def _warned(warning: str) -> tuple[int, str]:
    """Return the update and the metric that a warning names; (0, "") if it names no metric."""
    found = re.match(r"Update (\d+)\. [^:]+: (?:drop of )?(\S+) is ", warning)
    return (int(found[1]), found[2]) if found else (0, "")


def _stopped(curves: Curves) -> list[tuple[int, float]]:
    """Return the fraction of each update's responses that ended with a stop token."""
    ended, shares, before = dict(curves.get("val/num_eos_tokens", [])), [], 0.0
    for update, episode in curves[EPISODE]:
        if update in ended and episode > before:
            shares.append((update, ended[update] / (episode - before)))
        before = episode
    return shares
