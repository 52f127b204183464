"""Collect the feedback of users, and turn it into weighted rows that train reward models."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote

from human_feedback.implausible_users import ImplausibleUser, find_implausible
from human_feedback.opinions import LeftOut, Opinion
from human_feedback.same_answers import count_contradictions, without_repetitions
from pipeline.inputs.json_lines import write_jsonl
from ppo_core.io.atomic_files import require_writable
from ppo_core.reporting.escaping import one_line

FEEDBACK, LEFT_OUT = "feedback.jsonl", "left-out.jsonl"
"""Names of the file of used opinions and of the file of left-out opinions."""

SECONDS_OF_A_DAY = 86_400

LEAST_WEIGHT = 1e-4
"""Minimum weight of a used opinion. An opinion with a smaller weight has almost no effect."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Collected feedback."""

    opinions: list[Opinion]
    """The opinions that are used."""

    weights: list[float]
    """The weight of each of these opinions."""

    left_out: list[LeftOut]

    contradictions: int
    """Number of answers, or pairs of answers, on which users disagree. Contradicting opinions are
    not left out."""

    implausible: list[ImplausibleUser]
    """Users whose judgments look implausible. Their opinions are used; only users in the argument
    `without` of `collect` are left out."""


def collect(
    opinions: Sequence[Opinion],
    left_out: Sequence[LeftOut],
    without: Collection[str],
    *,
    half_life_days: float | None = None,
) -> Collected:
    """Choose and weight the opinions to use; find contradictions and implausible users.

    Repetitions, opinions of users in `without`, and opinions with a weight below LEAST_WEIGHT are
    left out. Without a half-life, each opinion has the weight 1. With a half-life, the newest
    opinion has the weight 1, and the weight halves with each half-life of age. An opinion without a
    time has the weight of the oldest opinion. If no opinion has a time, each has the weight 1.
    """
    gone = [
        LeftOut(one.source, "the user is named in --without-user", one.user)
        for one in opinions
        if one.user in without
    ]
    last, repeated = without_repetitions([one for one in opinions if one.user not in without])
    weighted = [*zip(last, weights_of([one.time for one in last], half_life_days), strict=True)]
    kept = [one for one, weight in weighted if weight >= LEAST_WEIGHT]
    old = [
        LeftOut(one.source, f"its weight is below {LEAST_WEIGHT:g} because of its age", one.user)
        for one, weight in weighted
        if weight < LEAST_WEIGHT
    ]
    return Collected(
        opinions=kept,
        weights=[weight for _, weight in weighted if weight >= LEAST_WEIGHT],
        left_out=[*left_out, *gone, *repeated, *old],
        contradictions=count_contradictions(kept),
        implausible=find_implausible(kept),
    )


def write_feedback(found: Collected, folder: Path) -> Path:
    """Write the files FEEDBACK and LEFT_OUT atomically; return the path of FEEDBACK.

    Raises:
        ConfigError: the folder cannot be written.
        TrainingError: a file cannot be written, for example because the disk is full.
    """
    require_writable(folder, "output_dir")
    rows = [
        {
            "prompt": one.prompt,
            "chosen": one.liked,
            "rejected": one.disliked,
            "weight": weight,
            "annotator": one.user,
            "version": one.version,
            "time": one.time.isoformat() if one.time else None,
            "source": one.source,
        }
        for one, weight in zip(found.opinions, found.weights, strict=True)
    ]
    write_jsonl(folder / LEFT_OUT, map(asdict, found.left_out))
    write_jsonl(folder / FEEDBACK, rows)
    return folder / FEEDBACK


def weights_of(times: Sequence[datetime | None], half_life_days: float | None) -> list[float]:
    """Return the weights of opinions that were given at these times; see `collect`."""
    known = [time for time in times if time is not None]
    if half_life_days is None or not known:
        return [1.0] * len(times)
    # A wrong clock may give a time in the future, by which all other opinions would be old.
    newest, oldest = min(max(known), datetime.now(UTC)), min(known)
    ages = [(newest - (time or oldest)).total_seconds() / SECONDS_OF_A_DAY for time in times]
    return [0.5 ** (max(age, 0.0) / half_life_days) for age in ages]


def describe_feedback(found: Collected, silent: int) -> list[str]:
    """Describe the used and the left-out opinions, as lines of text."""
    liked = sum(one.disliked is None for one in found.opinions)
    disliked = sum(one.liked is None for one in found.opinions)
    pairs = len(found.opinions) - liked - disliked
    versions = sorted({one.version for one in found.opinions if one.version})
    users = {one.user for one in found.opinions if one.user}
    lines = [
        f"{len(found.opinions)} opinions of {len(users)} known users: {liked} answers liked, "
        f"{disliked} disliked, {pairs} preferred to another answer.",
        f"Versions: {', '.join(versions) or 'unknown'}. {silent} answers have no feedback.",
        f"Users disagree on {found.contradictions} answers or pairs of answers; all opinions on "
        "them are used.",
    ]
    for reason, count in Counter(one.reason for one in found.left_out).most_common():
        lines.append(f"Left out: {count} ({reason}).")
    for one in found.implausible:
        lines.append(
            f"User {one.user!r} {one.reason}. To leave this user out: --without-user "
            f"{quote(one.user)}"
        )
    return [one_line(line) for line in lines]
