"""Describe a recorded time that lies in the future, because the clock of a machine is wrong."""

from datetime import UTC, datetime, timedelta

TOLERANCE = timedelta(minutes=5)
"""Largest difference between two clocks that is not reported."""


def describe_future(time: str, now: datetime | None = None) -> str:
    """Return a remark to append to an ISO 8601 time if the time lies in the future.

    The remark is empty if the time is not more than `TOLERANCE` ahead, or cannot be parsed.
    """
    now = now or datetime.now(UTC)
    try:
        ahead = datetime.fromisoformat(time) - now
    except (ValueError, TypeError, OverflowError):  # not a time, or a time without a time zone
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
