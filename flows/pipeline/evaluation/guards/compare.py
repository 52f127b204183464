"""Test whether a policy's answers have a property less often than its rival's answers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeline.evaluation.confidence_interval import mean_interval
from pipeline.evaluation.guards.scores import Guard, guards_of
from pipeline.evaluation.pair_accuracy import Array
from pipeline.evaluation.win_rate import mean_by_prompt
from pipeline.judges.verdict import JudgedPrompt
from pipeline.results.evaluation import GuardResult
from pipeline.settings.gate_configs import GuardsConfig
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.training.answer_prompts import Answers


class ComparedAnswers(NamedTuple):
    """Results of the guards, and the scores from which they follow."""

    results: dict[str, GuardResult]
    """Results by guard."""

    scores: dict[str, dict[str, Array]]
    """Scores (N,) of the answers by guard and policy. A policy is missing if the guard cannot score
    its answers, because they were decoded without a stop token."""

    notes: list[str]
    """A sentence on each guard that is not applied because scores are missing."""


def compare_by_guards(
    config: GuardsConfig,
    prompts: Sequence[JudgedPrompt],
    answers: Mapping[str, Answers],
    rival: str,
) -> ComparedAnswers:
    """Compare the answers of `ppo` with the answers of its rival, by every guard.

    Args:
        config: settings of the guards.
        prompts: prompts of the answers.
        answers: answers of `ppo`, the rival and other policies to all prompts.
        rival: the policy that `ppo` must beat.

    Raises:
        ConfigError: a function of a user cannot be loaded.
        DataError: a function raises an error, or does not return scores.
    """
    compared = ComparedAnswers({}, {}, [])
    for name, (source, guard) in guards_of(config).items():
        scores = _scores(guard, prompts, answers)
        compared.scores[name] = scores
        if missing := [who for who in ("ppo", rival) if who not in scores]:
            compared.notes.append(
                f"The guard {name} was not applied: the answers of {' and '.join(missing)} were "
                "sampled without a stop token."
            )
            continue
        margin = config.margin_of(name)
        own, other = scores["ppo"], scores[rival]
        compared.results[name] = compare_scores(prompts, own, other, margin=margin, source=source)
    return compared


def compare_scores(
    prompts: Sequence[JudgedPrompt], own: Array, other: Array, *, margin: float, source: str
) -> GuardResult:
    """Test whether the scores of a policy are worse than the scores of its rival.

    The policy is refused if both conditions hold for the 95 % interval of the mean difference:

        high < 0            it is shown to be worse
        low < -margin       a loss of more than the margin is not ruled out

    A policy that equals its rival is refused with a probability of at most 2.5 % for any scores,
    because `high` is below the true difference with at most this probability.

    Args:
        prompts: N prompts of the answers. The scores of equal prompts are averaged.
        own: scores (N,) of the policy, between 0 and 1.
        other: scores (N,) of the rival.
        margin: largest loss that is harmless.
        source: the guard, see `GuardResult.source`.
    """
    keys = list(map(shown_prompt, prompts))
    policy, rival = (mean_by_prompt(zip(keys, each.tolist(), strict=True)) for each in (own, other))
    differences = policy - rival
    low, high = mean_interval(differences, lowest=-1.0, highest=1.0)
    return GuardResult(
        policy=float(policy.mean()),
        rival=float(rival.mean()),
        difference=float(differences.mean()),
        low=low,
        high=high,
        n=len(differences),
        margin=margin,
        passed=high >= 0 or low >= -margin,
        source=source,
    )


def _scores(
    guard: Guard, prompts: Sequence[JudgedPrompt], answers: Mapping[str, Answers]
) -> dict[str, Array]:
    given = {who: guard(prompts, one) for who, one in answers.items()}
    return {who: scores for who, scores in given.items() if scores is not None}
