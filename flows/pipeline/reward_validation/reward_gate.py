"""The gate before PPO: check the measurements of a reward model against their limits."""

import math
from collections.abc import Mapping

from pipeline.results.reward_report import (
    Accuracy,
    Calibration,
    Lengths,
    OnPolicy,
    Rate,
    RewardReport,
    SampleScores,
)
from pipeline.settings.gate_configs import RewardGateConfig
from ppo_core.supervised.supervised_config import LOSS_AT

CHANCE_LOSS = math.log(2)
"""Training loss of a model that gives both responses of each pair the same score."""

LEARNED = 0.98
"""Fraction of CHANCE_LOSS below which the training loss shows that a model learned its pairs."""


def reasons_against(measured: RewardReport, limits: RewardGateConfig) -> list[str]:
    """Return the reasons against a reward model, as sentences; empty if it meets every limit.

    Each reason gives the measured value, its limit, and the consequence for PPO. If samples of the
    policy were not judged, the limit of the accuracy on held-out pairs is checked instead.
    """
    on_policy, people, lengths = measured.on_policy, measured.people, measured.lengths
    found = [
        _choice(on_policy, people)
        if on_policy
        else accuracy_too_low(measured.accuracy, limits, measured.training),
        _contradiction(people),
        _overconfidence(measured.calibration, limits),
        _length(lengths, limits),
        _short_answers(lengths, limits),
        _collapse(measured.samples, limits),
    ]
    return [reason for reason in found if reason]


def _contradiction(people: Rate | None) -> str:
    if people is None or people.high >= 0.5:
        return ""
    return (
        f"{_people(people)} PPO would move the policy towards answers that people like less. Train "
        "the reward model on pairs of the policy's own answers that people labeled."
    )


def undecided_people(people: Rate | None) -> str:
    """Return a warning if too few pairs are labeled to tell the model from a random choice."""
    if people is None or not people.low <= 0.5 <= people.high:
        return ""
    return (
        f"{_people(people)} This interval includes 50 %, the rate of a random choice. Label more "
        "pairs."
    )


def _people(people: Rate) -> str:
    return (
        f"It orders {people.accuracy:.1%} of {people.n} pairs of answers as people do, 95 % "
        f"interval {people.low:.1%} .. {people.high:.1%}."
    )


def _choice(found: OnPolicy, people: Rate | None) -> str:
    if found.usefulness != "useless":
        return ""
    cause = (
        "among the policy's answers, the judge does not prefer the answers with the highest "
        "reward, so PPO would not raise the win rate. Train the reward model on pairs of such "
        "answers."
    )
    if found.high > found.least:
        cause = (
            f"{found.pairs} pairs of answers do not show that the model is better than a random "
            "choice. Train the reward model on pairs of the policy's own answers, or raise "
            "max_prompts to measure more precisely."
        )
    return (
        "The best of four of the policy's answers, chosen by this model, wins "
        f"{found.best_of_four:.1%} against another answer, 95 % interval {found.low:.1%} .. "
        f"{found.high:.1%}, judged by {found.judge}. The lower end must exceed "
        f"min_best_of_4={found.least:.1%}: {cause}" + (f" {_people(people)}" if people else "")
    )


def accuracy_too_low(
    accuracy: Accuracy, limits: RewardGateConfig, training: Mapping[str, float]
) -> str:
    """Return the reason why the accuracy on held-out pairs is too low; empty if it is not."""
    if accuracy.low >= limits.min_accuracy:
        return ""
    cause = (
        "the model does not predict people's preferences, or there are too few pairs to show that "
        "it does."
    )
    if training and training["loss"] >= LEARNED * CHANCE_LOSS:
        cause = _not_learned(training)
    elif accuracy.high < accuracy.random:
        cause = (
            "the model prefers what people reject. Probably chosen and rejected are swapped in the "
            "training data or in the held-out pairs."
        )
    return (
        f"Its accuracy on {accuracy.n} held-out pairs is {accuracy.accuracy:.1%}, 95 % interval "
        f"{accuracy.low:.1%} .. {accuracy.high:.1%}. The lower end must be at least "
        f"min_accuracy={limits.min_accuracy:.1%}: {cause}"
    )


def _not_learned(training: Mapping[str, float]) -> str:
    """Return a text on why the model did not learn its training pairs, and what to do."""
    found = (
        "the model did not learn its training pairs: their loss was "
        f"{training['loss']:.3f} at the end of the training, and a model that "
        f"guesses has {CHANCE_LOSS:.3f}."
    )
    tried = {
        name.removeprefix(LOSS_AT): loss
        for name, loss in training.items()
        if name.startswith(LOSS_AT)
    }
    if not tried:
        return (
            f"{found} The learning rate of {training['learning_rate']:.1e} does not suit this "
            "model. Run again with --set reward_model_training.learning_rate=auto, which tries "
            "three rates and trains with the best."
        )
    losses = ", ".join(f"{loss:.3f} with {rate}" for rate, loss in tried.items())
    return (
        f"{found} Three learning rates were tried (loss on other pairs: {losses}), so the "
        "preferences are the likelier cause. Check whether people agree on them, add pairs, or "
        "start from a larger policy."
    )


def _overconfidence(calibration: Calibration, limits: RewardGateConfig) -> str:
    if calibration.error <= limits.max_calibration_error or calibration.overconfidence <= 0:
        return ""
    return (
        f"It is overconfident: its expected calibration error of {calibration.error:.2f} is "
        f"above max_calibration_error={limits.max_calibration_error}. PPO would get large rewards "
        "for wrong choices."
    )


def _length(lengths: Lengths, limits: RewardGateConfig) -> str:
    correlation = lengths.correlation
    if correlation is None or abs(correlation) <= limits.max_length_correlation:
        return ""
    return (
        f"Its score follows the length of a response (correlation {correlation:+.2f}, in "
        f"size above max_length_correlation={limits.max_length_correlation}): PPO would learn to "
        f"write {'long' if correlation > 0 else 'short'} answers."
    )


def _short_answers(lengths: Lengths, limits: RewardGateConfig) -> str:
    shorter = lengths.shorter
    if shorter is None or shorter.high >= limits.min_shorter_accuracy:
        return ""
    return (
        f"It is right in {shorter.accuracy:.1%} of the {shorter.n} pairs in which people prefer "
        f"the shorter response, below min_shorter_accuracy={limits.min_shorter_accuracy:.1%}: it "
        "prefers longer responses whatever their content."
    )


def _collapse(samples: SampleScores, limits: RewardGateConfig) -> str:
    if samples.deviation >= limits.min_sample_deviation:
        return ""
    return (
        f"The scores of the policy's samples have a standard deviation of {samples.deviation:.2g}, "
        f"below min_sample_deviation={limits.min_sample_deviation}: the reward model cannot tell "
        "one answer from another, so PPO would learn only from noise."
    )
