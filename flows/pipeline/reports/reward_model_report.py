"""Make the report on a reward model."""

from collections.abc import Mapping
from itertools import pairwise

from pipeline.reports.document import (
    Chart,
    Curve,
    Document,
    NamedRates,
    Section,
    Tone,
    as_interval,
    as_number,
    as_percent,
)
from pipeline.results.reward_report import (
    Accuracy,
    Calibration,
    Contract,
    Difference,
    EndOfText,
    Lengths,
    OnPolicy,
    Probes,
    Rate,
    RewardReport,
    Samples,
    Ties,
)

WHAT_FOLLOWS = {
    "useless": "Useless for this policy: PPO would gain nothing that the judge sees.",
    "usable": "Usable for this policy: PPO moves the policy far from SFT for little gain. With a "
    "reward model trained on labeled pairs of the policy's own answers, PPO gains more.",
    "good": "Good for this policy: what PPO gains from this model, the judge sees as well.",
}
"""Usefulness of a reward model on the policy's own answers -> the consequence for PPO."""

MARGINS = {"people": "people's margin", "model": "the model's own margin"}
"""Source of the margins by which the accuracy is grouped -> title."""

RATE_HEADERS = ("", "Right", "95 % interval", "Pairs")


def reward_document(report: RewardReport) -> Document:
    """Return the report on a reward model: verdict, measurements and baselines.

    Args:
        report: result of `validate`; `accepted_by_hand` says whether a person overruled a refusal.
    """
    verdict, tone = _verdict(report)
    return Document(
        subject="Is the reward model fit to train against?",
        verdict=verdict,
        tone=tone,
        reasons=reward_reasons(report),
        sections=tuple(reward_sections(report)),
    )


def reward_reasons(report: RewardReport) -> tuple[str, ...]:
    """Return the reasons for the verdict on a reward model, what follows for PPO, and warnings."""
    return (
        *(report.reasons or ["It keeps every limit of the gate."]),
        *([WHAT_FOLLOWS[report.on_policy.usefulness]] if report.on_policy else []),
        *report.warnings,
    )


def reward_sections(report: RewardReport) -> list[Section]:
    """Return the sections with the measurements of a reward model."""
    sections = (
        _on_policy(report.on_policy),
        _people(report.people),
        _accuracy(report.accuracy),
        _by_margin(report.accuracy),
        _by_category(report.accuracy),
        _ties(report.accuracy.ties),
        _calibration(report.calibration),
        _lengths(report.lengths),
        _samples(report.samples),
        _probes(report.probes),
        _contract(report.contract),
        _scale(report),
    )
    return [section for section in sections if section.rows]


def _verdict(report: RewardReport) -> tuple[str, Tone]:
    if report.fit:
        return "Fit", "success"
    if report.accepted_by_hand:
        return "Refused, and accepted by hand", "warning"
    return "Refused", "danger"


def _on_policy(found: OnPolicy | None) -> Section:
    title = "Choices among the policy's own answers"
    if found is None:
        return Section(title=title)
    # The gate decides by the best of four, so only the rate for k = 4 has an interval.
    decides = {"4": (as_interval(found), str(found.pairs))}
    rows: list[tuple[str, ...]] = [
        (f"Best of {k} against another answer", as_percent(rate), *decides.get(k, ("", "")))
        for k, rate in found.best_of.items()
    ]
    if found.accuracy:
        rows.append(_rate("Orders a decided pair as the judge does", found.accuracy))
    headers = (f"Judged by {found.judge}", *RATE_HEADERS[1:])
    return Section(title=title, headers=headers, rows=tuple(rows))


def _people(people: Rate | None) -> Section:
    return Section(
        title="Votes of people on pairs of answers",
        headers=RATE_HEADERS,
        rows=(_rate("Orders a pair as people do", people),) if people else (),
    )


def _accuracy(accuracy: Accuracy) -> Section:
    rows: list[tuple[str, ...]] = [
        _rate("This model", accuracy),
        _rate("Always the longer response", accuracy.longer),
        ("A tossed coin", as_percent(accuracy.random), "", ""),
    ]
    rows += [
        (f"Published for TL;DR, {size}", as_percent(share), "", "")
        for size, share in accuracy.anchors.items()
    ]
    if people := accuracy.people:
        name = f"People among themselves; coins would have {as_percent(people.by_chance)}"
        rows.append((name, as_percent(people.mean), "", str(people.n)))
    return Section(title="Accuracy on held-out preferences", headers=RATE_HEADERS, rows=tuple(rows))


def _by_margin(accuracy: Accuracy) -> Section:
    rates, title = accuracy.by_margin, f"Accuracy by {MARGINS[accuracy.margin_of]}"
    chart = Chart(
        title="Accuracy by margin",
        caption="A good model is right more often where the margin is larger.",
        data=_named({f"{name}, {one.n} pairs": one for name, one in rates.items()}),
    )
    return Section(
        title=title,
        charts=(chart,),
        headers=RATE_HEADERS,
        rows=tuple(_rate(name, rate) for name, rate in rates.items()),
    )


def _named(rates: Mapping[str, Rate]) -> NamedRates:
    return NamedRates(
        rates={name: (one.accuracy, one.low, one.high) for name, one in rates.items()}
    )


def _by_category(accuracy: Accuracy) -> Section:
    return Section(
        title="Accuracy by category",
        headers=RATE_HEADERS,
        rows=tuple(_rate(name, rate) for name, rate in accuracy.by_category.items()),
    )


def _ties(ties: Ties) -> Section:
    if not ties.n and not ties.identical:
        return Section(title="Ties")
    return Section(
        title="Pairs between which people see no difference",
        headers=("", "Pairs", "Mean distance of the two scores"),
        rows=(
            ("Two texts", str(ties.n), as_number(ties.margin)),
            ("Twice the same text", str(ties.identical), ""),
            ("Decided pairs, to compare", "", as_number(ties.decided_margin)),
        ),
    )


def _calibration(calibration: Calibration) -> Section:
    bins = {
        f"{number}. {part.confidence:.1%} sure, {part.n} pairs": part
        for number, part in enumerate(calibration.bins, 1)
    }
    chart = Chart(
        title="Accuracy by confidence",
        caption="A calibrated model is right as often as it is sure.",
        data=_named(bins),
    )
    return Section(
        title="Calibration: does its confidence match its accuracy?",
        charts=(chart,),
        headers=("", "This model", "A tossed coin"),
        rows=(
            ("Expected calibration error", as_number(calibration.error), ""),
            ("Mean confidence less accuracy", as_number(calibration.overconfidence), ""),
            ("Brier score", as_number(calibration.brier), "0.25"),
            ("Log loss, nats", as_number(calibration.log_loss), "0.693"),
            ("Best temperature of its scores", as_number(calibration.temperature), ""),
        ),
    )


def _lengths(lengths: Lengths) -> Section:
    rows: list[tuple[str, ...]] = [
        ("Rank correlation of score and characters", as_number(lengths.correlation), "", ""),
        (
            f"Rank correlation within a prompt, mean of {lengths.prompts} prompts",
            as_number(lengths.within_prompts),
            "",
            "",
        ),
    ]
    for name, rate in (("shorter", lengths.shorter), ("longer", lengths.longer)):
        if rate:
            rows.append(_rate(f"Right where people prefer the {name} response", rate))
    return Section(
        title="Length", headers=("", "Value", "95 % interval", "Pairs"), rows=tuple(rows)
    )


def _samples(samples: Samples) -> Section:
    rows = [
        ("Mean", as_number(samples.mean)),
        ("Standard deviation", as_number(samples.deviation)),
        ("Standard deviation within a prompt", as_number(samples.within_prompts)),
        *((f"{k} % lie below", as_number(score)) for k, score in samples.quantiles.items()),
        *((f"Best of {k}, expected", as_number(score)) for k, score in samples.best_of.items()),
    ]
    rows.append(("Repeat an earlier sample of the prompt", as_percent(samples.duplicates)))
    if references := samples.references:
        above = f"{as_percent(references.above_samples)}, {as_interval(references)}"
        rows += [
            ("Mean of the references", as_number(references.mean)),
            ("A reference scores above a sample, 95 % interval", above),
        ]
    return Section(
        title="Scores of the SFT policy's samples",
        charts=_sample_charts(samples),
        headers=(f"{samples.prompts} prompts, {samples.per_prompt} samples each", "Score"),
        rows=tuple(rows),
    )


def _sample_charts(samples: Samples) -> tuple[Chart, ...]:
    middles = [(low + high) / 2 for low, high in pairwise(samples.edges)]
    counts = Curve(points=tuple(zip(middles, samples.counts, strict=True)))
    best = Curve(points=tuple((int(k), score) for k, score in samples.best_of.items()))
    return (
        Chart(title="Samples by score", caption="Number of samples in each range.", data=counts),
        Chart(title="Best of k samples", caption="Expected score by k.", data=best),
    )


def _probes(probes: Probes) -> Section:
    rows = [
        (
            name,
            as_percent(probe.preferred),
            as_interval(probe),
            as_number(probe.gain),
            str(probe.n),
            "yes" if probe.gating else "no",
        )
        for name, probe in probes.probes.items()
    ]
    rows.append(("too short or too long to try", "", "", "", str(probes.left_out), ""))
    return Section(
        title="Probes: changed references that it should not prefer",
        headers=("", "Preferred", "95 % interval", "Mean gain", "References", "Reason to refuse"),
        rows=tuple(rows),
    )


def _contract(contract: Contract) -> Section:
    ways = {
        "Batches of one text, or of many": contract.batch,
        "More padding on the right": contract.right_filler,
        "Padding on the left": contract.left_filler,
    }
    vocabulary = contract.vocabulary
    return Section(
        title="Contract: the same text has the same score, and every text has one",
        headers=("", "Found", "As a multiple of the standard deviation of real scores"),
        rows=(
            *(_difference(name, found) for name, found in ways.items()),
            *_end_of_text(contract.end_of_text),
            *(
                (f"Score of an odd text: {name}", _finite(score), "")
                for name, score in contract.odd_scores.items()
            ),
            ("Largest token id", str(vocabulary.largest_id), ""),
            ("Tokens that the model knows", str(vocabulary.embeddings), ""),
            ("Unknown tokens in real texts", as_percent(vocabulary.unknown), ""),
            ("Tokenizer, SHA-256", _short(vocabulary.digest), ""),
            ("Chat template, SHA-256", _short(vocabulary.chat_template or "none"), ""),
        ),
    )


def _difference(name: str, found: Difference | None) -> tuple[str, ...]:
    if found is None:
        return name, "not measurable", ""
    if found.largest is None:
        return name, "not finite", ""
    return name, f"differs by up to {as_number(found.largest)}", as_number(found.share)


def _finite(score: float | None) -> str:
    return "not finite" if score is None else as_number(score)


def _short(digest: str) -> str:
    """Return the first 12 digits of a digest; the JSON report has the full digest."""
    return digest[:12]


def _end_of_text(ends: EndOfText | None) -> list[tuple[str, ...]]:
    name = "End-of-sequence token after a response"
    if ends is None:
        return [(name, "not measurable", "")]
    return [
        (name, "read" if ends.as_set else "not read", ""),
        ("Accuracy with this setting", as_percent(ends.accuracy), ""),
        ("Accuracy with the opposite setting", as_percent(ends.other_accuracy), ""),
    ]


def _scale(report: RewardReport) -> Section:
    return Section(
        title="The reward that PPO gets: gain times (score less bias)",
        headers=("Bias", "Gain"),
        rows=((as_number(report.bias), as_number(report.gain)),),
    )


def _rate(name: str, rate: Rate) -> tuple[str, ...]:
    return name, as_percent(rate.accuracy), as_interval(rate), str(rate.n)
