"""The next time of a schedule, as Argo and EventBridge compute it."""

from datetime import UTC, datetime

import pytest

from deployment.overview import next_run
from ppo_core.errors import ConfigError


@pytest.mark.parametrize(
    ("cron", "timezone", "after", "expected"),
    [
        # 2026-10-19 is a Monday; Berlin leaves summer time on Sunday, 2026-10-25.
        ("0 3 * * MON", "", "2026-10-19T02:59", "2026-10-19T03:00+00:00"),
        ("0 3 * * MON", "Europe/Berlin", "2026-10-19T02:59", "2026-10-26T03:00+01:00"),
        ("0 3 * * MON", "Europe/Berlin", "2026-10-19T00:59", "2026-10-19T03:00+02:00"),
        ("0 3 ? * MON *", "", "2026-10-19T03:00", "2026-10-26T03:00+00:00"),
        ("30 1 1 * ? *", "", "2026-10-19T00:00", "2026-11-01T01:30+00:00"),
        ("0 3 ? * MON#1 *", "", "2026-10-19T00:00", "2026-11-02T03:00+00:00"),
        ("0 */6 * * *", "", "2026-10-19T06:00", "2026-10-19T12:00+00:00"),
    ],
)
def test_the_next_time(cron: str, timezone: str, after: str, expected: str):
    start = datetime.fromisoformat(after).replace(tzinfo=UTC)
    assert next_run(cron, timezone, start) == datetime.fromisoformat(expected)


@pytest.mark.parametrize("cron", ["61 3 * * MON", "0 3 30 FEB *", "a b c d e"])
def test_times_that_never_come_are_refused(cron: str):
    with pytest.raises(ConfigError, match=r"has no next time: .* Correct its fields"):
        next_run(cron, "")
