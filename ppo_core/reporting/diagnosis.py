"""Find what is wrong in a training from the metrics of all its updates.

The guards of `ppo_core.reporting.health` judge each update, and warn while the run trains. The
trends of this module judge the whole run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import TypeAlias

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.reporting.health import GUARDS, Finding, HealthMonitor
from ppo_core.reporting.metrics_file import UPDATE
from ppo_core.reporting.reward_drop import NOISE_PER_CHANGE, WINDOW

Updates: TypeAlias = Sequence[Mapping[str, float]]
"""Metrics of all updates in order, each with the number of the update as `update`."""

FEWEST_UPDATES = 2 * WINDOW
"""Minimum number of updates for judging every trend; some trends need fewer."""

STOPPED_AT_FIRST, STOPPED_AT_LAST, EVER_STOPPED = 0.05, 0.01, 0.002
"""Limits for the fraction of responses that end with a stop token. A policy has forgotten to stop
if the fraction falls from above the first limit to below the second. It never stops if the mean
fraction over the run is below the third."""

FEW_CLIPPED = 0.001
"""Mean share of clipped tokens below which optimizer steps hardly change the policy."""

GAIN, CLEAR_GAIN = 1.0, 3.0
"""Limits for the rise of the mean score from the first to the last window: a policy learns above
the first limit, and clearly learns above the second. The unit is the standard deviation of the
noise of one update. Without a trend, the standard deviation of the rise is 0.45."""

SPIKE = 5.0
"""Factor by which a spike exceeds all value losses of the preceding window, and the median value
loss of the run."""

SAMPLING_SHARE, SCORING_SHARE, WAITING_SHARE = 0.8, 0.5, 0.5
"""Limits for the fraction of a run's time in sampling, in scoring, and outside all phases."""

SECONDS_THAT_MATTER = 1.0
"""Lost time is reported only above this number of seconds per update."""


@dataclass(frozen=True, kw_only=True)
class Trend:
    """A rule about the metrics of a whole run."""

    evidence: Callable[[PPOConfig, Updates], str]
    """Function that describes the metrics that show the fault, or returns "" without a fault."""

    advice: str
    """Probable cause, and what to change."""

    source: str
    """Origin of the rule."""


def diagnose(config: PPOConfig, updates: Updates) -> list[Finding]:
    """Return what is wrong in a training, at most one finding per rule; [] for a healthy run."""
    begun: dict[str, Finding]
    monitor, begun = HealthMonitor(config), {}
    for metrics in updates:
        for finding in monitor.check(metrics):
            begun.setdefault(finding.rule, replace(finding, update=int(metrics[UPDATE])))
    return [
        *(_with_worst(finding, monitor, updates) for finding in begun.values()),
        *(
            Finding(rule=rule, evidence=evidence, advice=trend.advice, source=trend.source)
            for rule, trend in TRENDS.items()
            if (evidence := trend.evidence(config, updates))
        ),
    ]


def judged_worse(first: float, last: float, win_rate: tuple[float, float, float]) -> list[Finding]:
    """Return a finding if the scores rose, but a judge prefers the policy from before the training.

    Args:
        first: mean score of the first update.
        last: mean score of the last update.
        win_rate: win rate against the policy from before the training, and the lower and upper
            bound of its 95 % interval.
    """
    rate, low, high = win_rate
    if not (last > first and high < 0.5):
        return []
    return [
        Finding(
            rule="reward up, judge down",
            evidence=f"objective/scores rose from {first:.3g} to {last:.3g}, and the policy wins "
            f"{rate:.1%} against the policy before the training (95 % interval {low:.1%} .. "
            f"{high:.1%})",
            advice="The policy exploits faults of the reward. Read its answers, correct the "
            "reward or train the reward model on pairs of these answers, and raise kl_coef.",
            source="arXiv:2210.10760 (Gao et al.): overoptimization of reward models",
        )
    ]


def _with_worst(finding: Finding, monitor: HealthMonitor, updates: Updates) -> Finding:
    """Add to the evidence the worst value of the guard's metric, and whether it recovered."""
    guard, evidence = GUARDS[finding.rule], finding.evidence
    found = [each for each in updates if math.isfinite(each.get(guard.metric, math.nan))]
    if found:
        worst = max if guard.side == "above" else min
        there = worst(found, key=lambda each: each[guard.metric])
        evidence += f"; worst {there[guard.metric]:.3g} in update {there[UPDATE]}"
    if not monitor.is_lasting(finding.rule):
        evidence += "; it recovered"
    return replace(finding, evidence=evidence)


def _values(updates: Updates, name: str) -> list[float]:
    """Return the finite values of a metric."""
    return [value for each in updates if math.isfinite(value := each.get(name, math.nan))]


def _gain(scores: Sequence[float]) -> float:
    """Return the rise of the mean from the first to the last window, in units of the noise."""
    noise = NOISE_PER_CHANGE * fmean(abs(b - a) for a, b in pairwise(scores))
    return (fmean(scores[-WINDOW:]) - fmean(scores[:WINDOW])) / noise if noise > 0 else 0.0


def _never_stops(config: PPOConfig, updates: Updates) -> str:
    if not updates or (config.stop_token is None and config.stop_token_id is None):
        return ""
    # All updates have equally many responses, and `episode` counts the responses so far.
    last_update = updates[-1]
    responses = last_update.get("episode", 0.0) / last_update[UPDATE]
    shares = [count / responses for count in _values(updates, "val/num_eos_tokens") if responses]
    if len(shares) < FEWEST_UPDATES:
        return ""
    first, last = fmean(shares[:WINDOW]), fmean(shares[-WINDOW:])
    forgot = first > STOPPED_AT_FIRST and last < STOPPED_AT_LAST
    if not forgot and fmean(shares) >= EVER_STOPPED:
        return ""
    return (
        f"val/num_eos_tokens: {first:.1%} of the responses of the first {WINDOW} updates ended "
        f"with a stop token, and {last:.1%} of the last {WINDOW}"
    )


def _useless_critic(config: PPOConfig, updates: Updates) -> str:
    values = _values(updates, "val/explained_variance")
    late = values[len(values) // 2 :]
    if len(values) < FEWEST_UPDATES or median(late) > 0:
        return ""
    value = f"{median(late):.3g}"
    return f"the median of val/explained_variance in the last {len(late)} updates is {value}"


def _learns_nothing(config: PPOConfig, updates: Updates) -> str:
    clipped, scores = (
        _values(updates, name) for name in ("policy/clipfrac_avg", "objective/scores")
    )
    if min(len(clipped), len(scores)) < FEWEST_UPDATES or fmean(clipped) >= FEW_CLIPPED:
        return ""
    if _gain(scores) >= GAIN:
        return ""
    return (
        f"the mean of policy/clipfrac_avg is {fmean(clipped):.2g}, and objective/scores was "
        f"{fmean(scores[:WINDOW]):.3g} in the first {WINDOW} updates and "
        f"{fmean(scores[-WINDOW:]):.3g} in the last {WINDOW}"
    )


def _bought_reward(config: PPOConfig, updates: Updates) -> str:
    scores, kl = (_values(updates, name) for name in ("objective/scores", "objective/kl"))
    if min(len(scores), len(kl)) < FEWEST_UPDATES or fmean(kl[-WINDOW:]) <= config.warn_kl:
        return ""
    if _gain(scores) < CLEAR_GAIN:
        return ""
    return (
        f"objective/scores rose from {fmean(scores[:WINDOW]):.3g} to {fmean(scores[-WINDOW:]):.3g} "
        f"while objective/kl rose to {fmean(kl[-WINDOW:]):.3g}, above {config.warn_kl:.3g} "
        f"(warn_kl; means of {WINDOW} updates)"
    )


def _value_spike(config: PPOConfig, updates: Updates) -> str:
    losses = [
        (metrics[UPDATE], metrics["loss/value_avg"])
        for metrics in updates
        if math.isfinite(metrics.get("loss/value_avg", math.nan))
    ]
    usual = median(loss for _, loss in losses) if losses else 0.0
    for place in range(WINDOW, len(losses)):
        update, loss = losses[place]
        before = max(each for _, each in losses[place - WINDOW : place])
        if loss > SPIKE * max(before, usual) > 0:
            return (
                f"loss/value_avg is {loss:.3g} in update {update}, and at most {before:.3g} in "
                f"the {WINDOW} updates before"
            )
    return ""


def _endless_warmup(config: PPOConfig, updates: Updates) -> str:
    rates = _values(updates, "lr")
    if len(rates) < WINDOW or not all(a < b for a, b in pairwise(rates)):
        return ""
    last = updates[-1]
    # Without total_episodes and max_steps, the number of prompts decides where the run ends.
    is_complete = last.get("episode", 0.0) >= (config.total_episodes or math.inf)
    if not is_complete and last[UPDATE] != config.max_steps:
        return ""  # the run has not ended, or may not have ended
    return f"lr rises in each update, from {rates[0]:.2g} to {rates[-1]:.2g} in the last"


def _seconds(updates: Updates) -> dict[str, float]:
    """Return the seconds of each phase, and the seconds outside all phases as `waiting`."""
    phases = ("sampling", "scoring", "updating")
    seconds = {name: sum(_values(updates, f"time/{name}")) for name in phases}
    last = updates[-1]
    # `episode` also counts the updates before a resume, which may have no metrics here.
    episodes = last.get("episode", 0.0) / last[UPDATE] * len(updates)
    total = episodes / last["eps"] if last.get("eps") else 0.0
    return seconds | {"waiting": max(0.0, total - sum(seconds.values()))}


def _slow(phase: str, limit: float, metrics: str) -> Callable[[PPOConfig, Updates], str]:
    """Return the evidence function for a phase that takes more than `limit` of the time."""

    def evidence(config: PPOConfig, updates: Updates) -> str:
        if len(updates) < WINDOW:
            return ""
        seconds = _seconds(updates)
        lost, total = seconds[phase], sum(seconds.values())
        if lost <= limit * total or lost <= SECONDS_THAT_MATTER * len(updates):
            return ""
        return (
            f"{metrics} takes {lost / total:.0%} of the time, {lost / len(updates):.1f} seconds "
            "per update"
        )

    return evidence


TRENDS = {
    "no end tokens": Trend(
        evidence=_never_stops,
        advice="Responses are cut off at response_length, so the reward scores unfinished texts. "
        "Set missing_eos_penalty, raise response_length, or fine-tune the policy on texts that "
        "end with the stop token. If responses need no end, set stop_token=None.",
        source="TRL's documentation of PPO (missing_eos_penalty), arXiv:2403.17031",
    ),
    "useless critic": Trend(
        evidence=_useless_critic,
        advice="The critic is no better than a constant, so advantages are as noisy as without "
        "a critic. Set critic_warmup_updates, change critic_learning_rate, or raise "
        "cliprange_value if val/clipfrac_avg is near 1. Or use no critic, with "
        "advantage_estimator='rloo'.",
        source="OpenAI Baselines, explained_variance: 0 is as good as predicting nothing",
    ),
    "learns nothing": Trend(
        evidence=_learns_nothing,
        advice="Optimizer steps are too small to change the policy. Raise learning_rate, and "
        "check that the scores of the responses to a prompt differ. If warmup_steps is longer "
        "than the run, lower it.",
        source="The 37 Implementation Details of PPO, detail 12 (clipfrac)",
    ),
    "reward up, divergence too": Trend(
        evidence=_bought_reward,
        advice="The policy probably exploits faults of the reward far away from the reference. "
        "Read its responses and measure a win rate before you trust the scores. Raise kl_coef, "
        "set kl_target, or keep an earlier policy (save_policies).",
        source="arXiv:2210.10760 (Gao et al.): overoptimization of reward models",
    ),
    "loss spike": Trend(
        evidence=_value_spike,
        advice="Some scores are far larger than all others, and one step can undo many. Look for "
        "outliers of the reward. Set score_clip or use_score_scaling, or lower max_grad_norm.",
        source="arXiv:2307.04964 (Secrets of RLHF), section 5.3: clipped and scaled rewards",
    ),
    "endless warm-up": Trend(
        evidence=_endless_warmup,
        advice="The learning rate never reached its peak. Lower warmup_steps or warmup_ratio.",
        source="the definition of a warm-up",
    ),
    "time lost to sampling": Trend(
        evidence=_slow("sampling", SAMPLING_SHARE, "time/sampling"),
        advice="Raise local_rollout_forward_batch_size as far as memory allows, lower "
        "response_length if most responses are padded, or set use_vllm.",
        source="arXiv:2405.11143 (OpenRLHF): generation takes most of the time",
    ),
    "time lost to scoring": Trend(
        evidence=_slow("scoring", SCORING_SHARE, "time/scoring"),
        advice="The reward function waits or computes for long. Answer all responses of a call "
        "together, in threads if it asks a server, or cache its results.",
        source="docs/metrics.md",
    ),
    "time lost to waiting": Trend(
        evidence=_slow("waiting", WAITING_SHARE, "time outside time/sampling, -scoring, -updating"),
        advice="Checkpoints, tables of samples, evaluations or callbacks take longer than the "
        "training. Raise save_steps and eval_steps, set async_save, or lower "
        "num_sample_generations.",
        source="docs/metrics.md",
    ),
}
"""Rules about the metrics of a whole run, by name."""
