"""Say that a recorded time lies in the future, so the clock of a machine is wrong."""

from datetime import UTC, datetime, timedelta

TOLERANCE = timedelta(minutes=5)
"""Differences between two clocks up to this are not reported."""


def describe_future(time: str, now: datetime | None = None) -> str:
    """Return words to append to a time in ISO 8601 that lies in the future; else nothing."""
    now = now or datetime.now(UTC)
    try:
        ahead = datetime.fromisoformat(time) - now
    except (ValueError, TypeError, OverflowError):  # no time, or one without its zone
        return ""
    if ahead <= TOLERANCE:
        return ""
    return f" ({describe_duration(ahead)} in the future, so the clock of a machine is wrong)"


def describe_duration(duration: timedelta) -> str:
    """Return a duration in whole days, hours or minutes."""
    minutes = int(abs(duration).total_seconds() // 60)
    for size, unit in ((24 * 60, "days"), (60, "hours")):
        if minutes >= 2 * size:
            return f"{minutes // size} {unit}"
    return f"{minutes} minutes"
