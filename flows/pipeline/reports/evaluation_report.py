"""Make the report on an evaluation."""

from collections.abc import Mapping, Sequence

from pipeline.evaluation.length_control import RATIO_NAMES
from pipeline.reports.baselines import (
    BASELINE_COLUMNS,
    BASELINE_TITLES,
    as_divergence,
    baseline_rows,
    worth_of_ppo,
)
from pipeline.reports.document import (
    GUARD_COLUMNS,
    Chart,
    Document,
    Front,
    NamedRates,
    Section,
    Tone,
    as_equal_length_rate,
    as_evidence,
    as_interval,
    as_number,
    as_percent,
    as_points,
    describe_annotator_test,
    guard_cells,
    guard_title,
)
from pipeline.reports.terminal import CONTEST_TITLES
from pipeline.results.evaluation import (
    CanaryReport,
    ContestResult,
    EnsembleAgreement,
    Evaluation,
    GuardResult,
    HumanAgreement,
    JudgeIdentity,
    LengthBin,
    PairedDifference,
)

WHO = {"reference": "References", "sft": "SFT", "ppo": "PPO", "champion": "Champion"}
"""Contestant -> its title."""


def evaluation_document(evaluation: Evaluation, warnings: Sequence[str] = ()) -> Document:
    """Return the report on whether PPO improved the policy.

    Args:
        evaluation: the report of `evaluate_policies`.
        warnings: warnings about the training of the policy.
    """
    verdict, tone = _verdict(evaluation)
    sections = (
        *better_sections(evaluation),
        without_ppo_section(evaluation),
        *honesty_sections(evaluation),
        *judge_sections(evaluation),
    )
    return Document(
        subject="Is the policy better after PPO than before?",
        verdict=verdict,
        tone=tone,
        reasons=(
            describe_rate(evaluation.against_sft, "SFT"),
            *evaluation.notes,
            *evaluation.reasons,
            *(worth_of_ppo(evaluation.baselines) if evaluation.baselines else ()),
            *_on_people(evaluation.people),
            *(f"Warning: {warning}" for warning in warnings),
        ),
        sections=tuple(section for section in sections if section.rows),
    )


def better_sections(evaluation: Evaluation) -> list[Section]:
    """Return the sections on whether the policy is better, beginning with the win rates."""
    return _filled(_win_rates(evaluation.win_rate), _improvement(evaluation.improvement))


def honesty_sections(evaluation: Evaluation) -> list[Section]:
    """Return the sections on whether the policy wins only by length, style or repetition."""
    win_rates = evaluation.win_rate
    return _filled(
        _lengths(win_rates),
        _style(win_rates),
        _length_ratios(win_rates),
        _guards(evaluation.guards),
        _policies(evaluation),
    )


def judge_sections(evaluation: Evaluation) -> list[Section]:
    """Return the sections on whether the judge can be trusted."""
    return _filled(
        _judge(evaluation.judge),
        _canaries(evaluation.canaries),
        _people(evaluation.people),
        _alternative(evaluation.people),
        _ensemble(evaluation.win_rate),
    )


def without_ppo_section(evaluation: Evaluation) -> Section:
    """Return the comparison of PPO with baselines of SFT; without baselines, it has no rows."""
    return Section(
        title="What SFT reaches without PPO, on the same prompts",
        charts=_front(evaluation),
        headers=("", *BASELINE_COLUMNS),
        rows=baseline_rows(evaluation),
    )


def _front(evaluation: Evaluation) -> tuple[Chart, ...]:
    """Return the chart of win rates by KL divergence, if rate and divergence of PPO are known."""
    baselines, kl = evaluation.baselines, evaluation.kl_of_ppo
    if baselines is None or baselines.ppo is None or kl is None:
        return ()
    points = {
        BASELINE_TITLES[name]: (one.kl, (one.win_rate.rate, one.win_rate.low, one.win_rate.high))
        for name, one in baselines.found.items()
        if one.kl is not None and one.win_rate is not None
    }
    points["SFT"] = (0.0, (0.5, 0.5, 0.5))
    points["PPO"] = (kl, (baselines.ppo.rate, baselines.ppo.low, baselines.ppo.high))
    chart = Chart(
        title="Wins against SFT by KL from SFT",
        caption="Higher is better; further to the right is further from SFT, in nats.",
        data=Front(points=points),
    )
    return (chart,)


def _filled(*sections: Section) -> list[Section]:
    return [section for section in sections if section.rows]


def _verdict(evaluation: Evaluation) -> tuple[str, Tone]:
    against_sft = evaluation.against_sft
    if not evaluation.conclusive:
        return "Inconclusive", "warning"
    if against_sft.low > 0.5:
        return "Better", "success"
    if against_sft.high < 0.5:
        return "Worse", "danger"
    return "No difference shown", "warning"


def describe_rate(rate: ContestResult, rival: str) -> str:
    """Return the win rate of PPO against a rival as a sentence."""
    return (
        f"PPO wins {as_percent(rate.rate)} of {rate.n} pairs against {rival}, 95 % "
        f"interval {as_interval(rate)}, judged by {rate.judge}."
    )


def _win_rates(win_rates: Mapping[str, ContestResult]) -> Section:
    chart = Chart(
        title="Pairs won",
        caption="Share of pairs won, with its 95 % interval. A tie is half a win. Dashed: 50 %.",
        data=NamedRates(
            rates={
                CONTEST_TITLES[name]: (one.rate, one.low, one.high)
                for name, one in win_rates.items()
            }
        ),
    )
    return Section(
        title="Win rates",
        text=(
            "Evidence of 1,000 : 1 means that at most one in 1,000 policies that are not better "
            "reaches this evidence by luck.",
        ),
        charts=(chart,),
        headers=(
            "",
            "Wins",
            "95 % interval",
            "Pairs",
            "Ties",
            "Invalid",
            "Followed the position",
            "Evidence",
        ),
        rows=tuple(
            (
                CONTEST_TITLES[name],
                as_percent(rate.rate),
                as_interval(rate),
                str(rate.n),
                str(rate.ties),
                str(rate.invalid),
                as_percent(rate.flip_rate),
                as_evidence(rate),
            )
            for name, rate in win_rates.items()
        ),
    )


def _improvement(improvement: PairedDifference | None) -> Section:
    title = "Wins against the references: PPO less SFT, on the same prompts"
    if improvement is None:
        return Section(title=title)
    return Section(
        title=title,
        headers=("Difference", "95 % interval, points", "Pairs"),
        rows=((*as_points(improvement), str(improvement.n)),),
    )


def _lengths(win_rates: Mapping[str, ContestResult]) -> Section:
    return Section(
        title="Without the advantage of length",
        headers=("", "Wins", "Wins at equal length", "Pairs of about equal length"),
        rows=tuple(
            (
                CONTEST_TITLES[name],
                as_percent(rate.rate),
                as_equal_length_rate(rate),
                f"{rate.equal_length_pairs} of {rate.n}",
            )
            for name, rate in win_rates.items()
        ),
    )


def _style(win_rates: Mapping[str, ContestResult]) -> Section:
    return Section(
        title="Without the advantage of length and Markdown",
        headers=("", "Wins", "Wins at equal style", "Pairs of equal style"),
        rows=tuple(
            (
                CONTEST_TITLES[name],
                as_percent(rate.rate),
                as_percent(rate.style_controlled),
                f"{rate.equal_style_pairs} of {rate.n}",
            )
            for name, rate in win_rates.items()
            if rate.style_controlled is not None
        ),
    )


def _length_ratios(win_rates: Mapping[str, ContestResult]) -> Section:
    bins = {
        name: {part.ratio: part for part in rate.by_length_ratio}
        for name, rate in win_rates.items()
    }
    return Section(
        title="Wins by the length of the answer divided by the length of its opponent",
        headers=("Characters", *(CONTEST_TITLES[name] for name in win_rates)),
        rows=tuple(
            (ratio, *(_share_of(parts.get(ratio)) for parts in bins.values()))
            for ratio in RATIO_NAMES
        ),
    )


def _share_of(part: LengthBin | None) -> str:
    return f"{as_percent(part.rate)} of {part.n}" if part else ""


def _canaries(canaries: CanaryReport) -> Section:
    return Section(
        title="Canaries: answers that a sound judge does not choose",
        headers=("Canary", "Chosen", "Asked", "Invalid", "The judge"),
        rows=tuple(
            (
                kind,
                str(found.won),
                str(found.asked),
                str(found.invalid),
                "fell for it" if found.fell else "is sound" if found.tested else "was not tested",
            )
            for kind, found in canaries.kinds.items()
        ),
    )


def _people(people: HumanAgreement | None) -> Section:
    if people is None:
        return Section(title="The judge and people")
    counts = people.confusion
    return Section(
        title="The judge and people on the same pairs",
        headers=("People say", *(f"Judge: {outcome}" for outcome in counts)),
        rows=(
            *((label, *map(str, row.values())) for label, row in counts.items()),
            ("Agreement", as_percent(people.share), f"of {people.n} pairs", ""),
            ("Cohen's kappa", as_number(people.kappa), "", ""),
            ("Invalid", str(people.invalid), "", ""),
        ),
    )


def _alternative(people: HumanAgreement | None) -> Section:
    test = people and people.alternative
    return Section(
        title="For each person: who agrees more with the other people, the judge or this person? "
        "(alternative annotator test)",
        headers=("Person", "Pairs", "Judge at least as near", "Person at least as near", "p", ""),
        rows=tuple(
            (
                name,
                str(one.n),
                as_percent(one.judge),
                as_percent(one.person),
                as_number(one.p),
                "replaceable" if one.replaceable else "not replaceable",
            )
            for name, one in (test.people.items() if test else ())
        ),
    )


def _on_people(people: HumanAgreement | None) -> tuple[str, ...]:
    return (describe_annotator_test(people.alternative),) if people and people.alternative else ()


def _ensemble(win_rates: Mapping[str, ContestResult]) -> Section:
    """Return win rates and agreement of the judges of an ensemble."""
    return Section(
        title="The judges of the ensemble",
        headers=("", "Judges", "Wins", "Same outcome", "Kappa"),
        rows=tuple(
            row
            for name, rate in win_rates.items()
            if rate.agreement
            for row in _judges(CONTEST_TITLES[name], rate.agreement)
        ),
    )


def _judges(contest: str, agreement: EnsembleAgreement) -> list[tuple[str, ...]]:
    return [
        *((contest, judge, as_percent(rate), "", "") for judge, rate in agreement.rates.items()),
        *(
            (contest, " and ".join(pair.judges), "", as_percent(pair.share), as_number(pair.kappa))
            for pair in agreement.pairs
        ),
        (contest, "all (Fleiss)", "", "", as_number(agreement.fleiss_kappa)),
    ]


def _guards(guards: Mapping[str, GuardResult]) -> Section:
    return Section(
        title="Guards: what the policy must not lose against the champion (or SFT without a "
        "champion)",
        headers=("Guard", *GUARD_COLUMNS, "Prompts or documents"),
        rows=tuple(
            (guard_title(name), *guard_cells(guard), str(guard.n)) for name, guard in guards.items()
        ),
    )


def _policies(evaluation: Evaluation) -> Section:
    return Section(
        title="The answers",
        headers=(
            "",
            "KL of an answer from SFT, nats",
            "Distinct answers",
            "Words, mean",
            "Repeated 3-grams of words",
        ),
        rows=tuple(
            (
                WHO[who],
                as_divergence(evaluation.kl[who]) if who in evaluation.kl else "",
                as_percent(evaluation.distinct[who]),
                as_number(evaluation.length[who]),
                as_percent(evaluation.repetition[who]),
            )
            for who in evaluation.length
        ),
    )


def _judge(judge: JudgeIdentity) -> Section:
    return Section(
        title="Who judged",
        headers=("Judge", "Version"),
        rows=((judge.name, judge.version),),
    )
