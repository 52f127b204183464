"""Is this reward model fit to train against?"""

from collections.abc import Sequence
from dataclasses import dataclass

from statsmodels.stats.proportion import proportion_confint

from pipeline.data import Row, Rows
from ppo_core.errors import ModelError
from ppo_core.reward_model import RewardModel


@dataclass(frozen=True)
class Accuracy:
    """How often a reward model scores the chosen response above the rejected one."""

    accuracy: float
    """Share of the held-out pairs, equal scores counted as half."""

    low: float
    """Lower end of the 95 % interval (Wilson)."""

    high: float
    """Upper end of the 95 % interval (Wilson)."""

    n: int
    """Held-out pairs."""


def measure_accuracy(reward_model: RewardModel, pairs: Sequence[Row]) -> Accuracy:
    """The accuracy on pairs of chosen and rejected responses, perhaps with a prompt.

    Args:
        reward_model: the model to validate.
        pairs: rows that it was not trained on.

    Raises:
        ModelError: a score is not finite.
    """
    prompts = [pair.get("prompt", "") for pair in pairs]
    chosen = reward_model.score_texts(prompts, [pair["chosen"] for pair in pairs])
    rejected = reward_model.score_texts(prompts, [pair["rejected"] for pair in pairs])
    margins = (chosen - rejected).tolist()
    for number, margin in enumerate(margins):
        if not abs(margin) < float("inf"):
            raise ModelError(
                f"The reward model's scores for held-out pair {number} are not finite, so PPO "
                f"would learn nothing from them: {pairs[number]}."
            )
    n = len(margins)
    hits = sum(margin > 0 for margin in margins) + sum(margin == 0 for margin in margins) / 2
    low, high = proportion_confint(hits, n, alpha=0.05, method="wilson")
    return Accuracy(hits / n, float(low), float(high), n)


def mean_reference_score(reward_model: RewardModel, prompts: Rows, *, most: int = 1000) -> float:
    """Mean score of the first `most` references, 0 if the rows have none.

    Taken off every score as the reward's bias, it makes a reference answer worth 0.
    """
    if not prompts.has("reference"):
        print(f"{prompts.source} has no column reference: the reward keeps its own zero.")
        return 0.0
    scores = reward_model.score_texts(
        prompts.column("prompt")[:most], prompts.column("reference")[:most]
    )
    return scores.mean().item()
