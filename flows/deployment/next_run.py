"""Compute when a schedule starts a flow next."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from ppo_core.errors import ConfigError
from ppo_core.errors.packages import require_package


def next_run(cron: str, timezone: str, after: datetime | None = None) -> datetime:
    """Return the next time of a schedule, in its time zone.

    Args:
        cron: the times as Argo or EventBridge reads them, with days of the week by name.
        timezone: time zone of the times; empty for UTC.
        after: time from which on to look; by default now.

    Raises:
        ConfigError: there are no such times.
    """
    require_package("croniter", extra="deploy", needed_by="A schedule")
    from croniter import CroniterError, croniter

    # EventBridge writes ? for any day, and a year.
    fields = cron.replace("?", "*").split()[:5]
    start = (after or datetime.now(UTC)).astimezone(ZoneInfo(timezone or "UTC"))
    try:
        found: datetime = croniter(" ".join(fields), start).get_next(datetime)
    except CroniterError as error:
        raise ConfigError(
            f"schedule.cron={cron!r} has no next time: {error}. Correct its fields."
        ) from error
    return found
