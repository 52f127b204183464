"""Simulated weeks of the promotion gate, and the coverage of its intervals: `make weeks`."""

from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from pipeline.evaluation.compare_in_both_orders import POINTS, Comparison
from pipeline.evaluation.confidence_interval import log_capitals
from pipeline.evaluation.sequential.people_and_judge import corrected_values
from pipeline.evaluation.sequential.sequential_test import PAIRS_AT_ONCE, StoppingRule
from pipeline.evaluation.win_rate import values_of_prompts
from pipeline.judges.verdict import Verdict
from pipeline.registry.alpha_spending import limits_now
from pipeline.registry.decisions import Action, Decision
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.gate_configs import PromotionConfig
from tests.benchmarks.tables import make_table

RATES = (0.5, 0.53, 0.55, 0.6, 0.7, 0.8)
TIES = 0.2
YEARS = 500
WEEKS_OF_A_YEAR = 52
BETTER = (0.0, 0.1, 0.5)
"""Shares of the weeks of a year with a better policy."""

GAINED = 0.55
PEOPLE_WEEKS = 2_000
PEOPLE_RATES = (0.5, 0.65, 0.7, 0.8)
LABELED = 100
BIAS = 0.1

TRUTH = 0.6
TIES_OF_COVERAGE = (0.0, 0.2, 0.4, 0.6)
MOST_PAIRS_OF_A_PROMPT = 4
WEEKS = 10_000
VERDICTS = {points: Verdict(winner) for winner, points in POINTS.items()}
BEFORE = 512
"""Pairs that the gate of version 0.1 judged on the built-in task."""


@dataclass(frozen=True)
class Weeks:
    """Results of many weeks with one true win rate."""

    rate: float
    promoted: float
    """Share of the weeks in which the policy was promoted."""

    pairs: float
    """Mean number of pairs that were judged."""

    before: float
    """Share of the weeks in which the gate of version 0.1 would have promoted the policy."""


def simulate(rate: float, *, weeks: int = WEEKS, seed: int = 0) -> Weeks:
    """Decide `weeks` times about a policy of a true win rate, as the gate decides."""
    limits, most = PromotionConfig(), EvaluationConfig().num_examples
    least = limits.min_win_rate
    rule = StoppingRule(least=least, gain=limits.gain_above(least), alpha=limits.alpha)
    rng = np.random.default_rng(seed)
    promoted = pairs = before = 0
    for _ in range(weeks):
        points = _points(np.full(most, rate), TIES, rng)
        decided, stop = rule.first_decision(points)
        promoted += decided == "better"
        pairs += stop
        before += _promoted_before(points[:BEFORE])
    return Weeks(rate, promoted / weeks, pairs / weeks, before / weeks)


def _promoted_before(points: np.ndarray) -> bool:
    """Return whether the 95 % interval of the mean is above one half.

    The gate of version 0.1 used a bootstrap interval; the normal interval is close to it.
    """
    return bool(points.mean() - 1.96 * points.std() / np.sqrt(len(points)) > 0.5)


@dataclass(frozen=True)
class Years:
    """Results of many years of weekly decisions, some of them about better policies."""

    found: float
    """Share of the better policies that were promoted."""

    false: float
    """Mean over years of the share of false promotions among the promotions of the year."""

    with_false: float
    """Share of the years with a false promotion."""


def simulate_years(better: float, limits: PromotionConfig, *, seed: int = 0) -> Years:
    """Decide every week of YEARS years, of which a share `better` is about a better policy.

    A better policy has a true win rate of GAINED, and every other policy one of 50 %.
    """
    most = EvaluationConfig().num_examples
    rng = np.random.default_rng(seed)
    found, false, with_false = [], [], []
    for _ in range(YEARS):
        history: list[Decision] = []
        is_better = rng.uniform(size=WEEKS_OF_A_YEAR) < better
        for gained in is_better:
            now = limits_now(limits, history)
            least = now.min_win_rate
            rule = StoppingRule(least=least, gain=now.gain_above(least), alpha=now.alpha)
            rates = np.full(most, GAINED if gained else 0.5)
            promoted = rule.first_decision(_points(rates, TIES, rng))[0] == "better"
            history.append(_decision("promoted" if promoted else "refused"))
        promoted = np.array([each.action == "promoted" for each in history])
        found += promoted[is_better].tolist()
        false.append((promoted & ~is_better).sum() / max(promoted.sum(), 1))
        with_false.append((promoted & ~is_better).any())
    return Years(float(np.mean(found or [0.0])), np.mean(false), np.mean(with_false))


def _decision(action: Action) -> Decision:
    return Decision(
        number=1, action=action, version=1, champion=1, reasons=(), by="run R/1", at="", key="R"
    )


def years_table() -> Table:
    """Return the table of years, by share of better policies and rule for alpha."""
    table = make_table(
        f"{YEARS:,} years of {WEEKS_OF_A_YEAR} decisions; better policies win {GAINED:.0%}",
        "better policies|alpha|found|false among promotions|years with a false one",
    )
    for better in BETTER:
        for limits in (PromotionConfig(), PromotionConfig(false_promotion_rate=0.05)):
            fixed = limits.false_promotion_rate is None
            years = simulate_years(better, limits)
            table.add_row(
                f"{better:.0%}",
                f"{limits.alpha:g}" if fixed else "false_promotion_rate = 0.05",
                f"{years.found:.1%}" if better else "",
                f"{years.false:.2%}",
                f"{years.with_false:.1%}",
            )
    return table


def simulate_people(
    rate: float, *, weeks: int = PEOPLE_WEEKS, seed: int = 0
) -> tuple[float, float]:
    """Return the shares of weeks with a promotion: with labels, and by the judge alone.

    People prefer the policy at a rate and label LABELED of the pairs. The judge agrees with people
    in 75 % of the pairs, and then turns so many defeats into wins that its rate is BIAS higher.
    """
    limits, most = PromotionConfig(), EvaluationConfig().num_examples
    rule = StoppingRule(least=limits.min_win_rate, gain=None, alpha=limits.alpha)
    rng = np.random.default_rng(seed)
    looks = [*range(PAIRS_AT_ONCE, most, PAIRS_AT_ONCE), most]
    promoted = np.zeros(2)
    for _ in range(weeks):
        people = (rng.uniform(size=most) < rate).astype(float)
        judged = np.where(rng.uniform(size=most) < 0.75, people, 1 - people)
        judged[rng.uniform(size=most) < BIAS / (judged == 0).mean()] = 1.0
        labels = np.where(rng.permutation(most) < LABELED, people, np.nan)
        corrected = corrected_values(judged, labels, LABELED / most)
        evidence = log_capitals(corrected.values, limits.min_win_rate, corrected.lowest)
        promoted[0] += evidence[looks].max() >= -np.log(limits.alpha)
        promoted[1] += rule.first_decision(judged)[0] == "better"
    return promoted[0] / weeks, promoted[1] / weeks


def people_table() -> Table:
    """Return the table of promotions with people's labels, by people's win rate."""
    most = EvaluationConfig().num_examples
    table = make_table(
        f"{PEOPLE_WEEKS:,} weeks, a judge with a bias of {BIAS:.0%}, {LABELED} labels of {most:,}",
        "true win rate by people|promoted with labels|promoted by the judge alone",
    )
    for rate in PEOPLE_RATES:
        table.add_row(f"{rate:.0%}", *(f"{share:.1%}" for share in simulate_people(rate)))
    return table


def covered(ties: float, *, repeated: bool, runs: int = WEEKS, seed: int = 0) -> float:
    """Return the share of runs whose 95 % interval contains the true win rate at every look.

    The gate looks after each PAIRS_AT_ONCE pairs. The interval of `mean_interval` contains the
    truth exactly while the capital of the bets on both sides of the truth is below 2 / 0.05.

    Args:
        ties: share of the pairs that are ties.
        repeated: whether up to MOST_PAIRS_OF_A_PROMPT pairs have the same prompt, which then has
            its own win rate.
        runs: number of simulated runs.
        seed: seed of the outcomes.
    """
    most, limit = EvaluationConfig().num_examples, np.log(2 / 0.05)
    rng = np.random.default_rng(seed)
    inside = 0
    for _ in range(runs):
        sizes = (
            rng.integers(1, MOST_PAIRS_OF_A_PROMPT + 1, most) if repeated else np.ones(most, int)
        )
        prompts = np.repeat(np.arange(most), sizes)[:most]
        # A larger rate than 1 - ties / 2 is impossible.
        spread = 1 - ties / 2 - TRUTH if repeated else 0.0
        rates = rng.uniform(TRUTH - spread, TRUTH + spread, most)[prompts]
        values = values_of_prompts(_comparison(prompts, _points(rates, ties, rng)))
        looks = [*range(PAIRS_AT_ONCE, len(values), PAIRS_AT_ONCE), len(values)]
        above = log_capitals(values, TRUTH, 0.0)[looks]
        below = log_capitals(1 - values, 1 - TRUTH, 0.0)[looks]
        inside += max(above.max(), below.max()) < limit
    return inside / runs


def _points(rates: np.ndarray, ties: float, rng: np.random.Generator) -> np.ndarray:
    """Return the points of pairs with the given win rates, of which a share `ties` are ties."""
    wins = 0.5 + (rates - 0.5) / (1 - ties)  # of the pairs that are not ties
    is_tie = rng.uniform(size=len(rates)) < ties
    return np.where(is_tie, 0.5, rng.uniform(size=len(rates)) < wins)


def _comparison(prompts: np.ndarray, points: np.ndarray) -> Comparison:
    """Return pairs of numbered prompts with these points."""
    verdicts = tuple(VERDICTS[each] for each in points.tolist())
    texts = tuple(map(str, prompts.tolist()))
    return Comparison(
        prompts=texts,
        candidates=texts,
        opponents=texts,
        straight=verdicts,
        swapped=verdicts,
        judge="simulated",
    )


def coverage_table() -> Table:
    """Return the table of the coverage by share of ties."""
    table = make_table(
        f"95 % intervals that contain a win rate of {TRUTH:.0%} at every look, {WEEKS:,} runs",
        "ties|one pair of each prompt|up to four pairs of a prompt",
    )
    for ties in TIES_OF_COVERAGE:
        shares = (covered(ties, repeated=repeated) for repeated in (False, True))
        table.add_row(f"{ties:.0%}", *(f"{share:.2%}" for share in shares))
    return table


def weeks_table() -> Table:
    """Return the table of all true win rates."""
    table = make_table(
        f"{WEEKS:,} simulated weeks, {TIES:.0%} ties",
        "true win rate|promoted|pairs judged, mean|before: promoted|before: pairs",
    )
    for rate in RATES:
        found = simulate(rate)
        table.add_row(
            f"{rate:.0%}",
            f"{found.promoted:.2%}",
            f"{found.pairs:.0f}",
            f"{found.before:.2%}",
            str(BEFORE),
        )
    return table


if __name__ == "__main__":
    Console(width=100).print(weeks_table(), years_table(), people_table(), coverage_table())
