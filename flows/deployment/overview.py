"""Render a deployment's resources per step, and the state of its deployed flows, as text."""

import io
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from rich.console import Console
from rich.table import Table

from deployment.deployed_flow import CHANGES, COMMIT, DEPLOYMENT, SETTINGS, DeployedFlow
from deployment.deployment import Deployment, Schedule
from deployment.deployment_file import STEPS, STEPS_OF_SEVERAL_MACHINES
from deployment.step_settings import StepResources
from ppo_core.errors import ConfigError
from ppo_core.errors.packages import require_package

WIDTH = 118

FACTS = ("name", "deployed", "token", "settings", "code", "next start", "last run", "result")
"""Rows of the table that `--status` prints."""

EVENTBRIDGE_FIELDS = 6
"""Number of fields of a cron expression of EventBridge; the last field is the year."""

ONLY_EVENTBRIDGE = re.compile(r"(?<!\S)([A-Z]{3}L|L|LW|\d{1,2}W)(?!\S)")
"""Days that croniter cannot read: FRIL is the last Friday of a month, L the last day of the week,
LW the last weekday of a month, and 15W the weekday nearest to the 15th."""

SHORT_DIGEST = 12
"""Number of characters to show of a commit or of an image's digest."""


def render_deployment(deployment: Deployment, tags: Mapping[str, str], num_nodes: int) -> str:
    """Render the resources of each step, the schedule, the settings and the code as text.

    Args:
        deployment: the deployment.
        tags: the result of `tags_of`.
        num_nodes: number of machines that share each training.

    Raises:
        ConfigError: the schedule has no next time.
    """
    table = Table(title=f"{deployment.scheduler}: {deployment.project}", title_justify="left")
    for column in ("step", "image", "cpu", "memory", "GPU", "rights", "secrets"):
        table.add_column(column, overflow="fold")
    for name, resources in _rows(deployment, num_nodes):
        table.add_row(name, *_cells(deployment, resources))
    lines = [
        f"starts: {_starts(deployment.schedule)}",
        f"settings: {tags[SETTINGS]} ({deployment.settings})",
        f"code: {_code(tags)}",
    ]
    return _render(table, lines)


def render_status(found: Mapping[str, DeployedFlow | None], tags: Mapping[str, str]) -> str:
    """Render the state of the deployed flows as text.

    Args:
        found: flow -> its state at the scheduler; None if the flow is not deployed.
        tags: the current result of `tags_of`, for comparison with the tags of the deployed flows.
    """
    table = Table("", *found)
    columns = [_facts(one, tags) for one in found.values()]
    for row, name in enumerate(FACTS):
        table.add_row(name, *(facts[row] for facts in columns))
    older = any(one and one.tags.get(DEPLOYMENT) != tags[DEPLOYMENT] for one in found.values())
    note = "The deployment file has changed since: --create deploys it as it is now."
    return _render(table, [note] if older else [])


def _facts(flow: DeployedFlow | None, tags: Mapping[str, str]) -> list[str]:
    """Return the cells of a flow, in the order of FACTS."""
    if flow is None:
        return ["not deployed", *[""] * (len(FACTS) - 1)]
    start = _next_start(flow.cron, flow.timezone) if flow.cron else "none"
    settings = _settings(flow.tags, tags)
    known = [flow.name, flow.deployed_at[:19], flow.token, settings, _code(flow.tags), start]
    return [*known, flow.last_run or "none", flow.result]


def _rows(deployment: Deployment, num_nodes: int) -> Iterator[tuple[str, StepResources]]:
    yield "Retrain: both steps", deployment.retrain
    steps = [*STEPS, *(STEPS_OF_SEVERAL_MACHINES if num_nodes > 1 else ())]
    yield from ((f"RLHF: {step}", deployment.resources_of(step)) for step in steps)


def _cells(deployment: Deployment, resources: StepResources) -> list[str]:
    gpu = f"{resources.gpu} {resources.gpu_type}".strip() if resources.gpu else ""
    return [
        _short_image(deployment.image_of(resources)),
        f"{resources.cpu:g}",
        f"{resources.memory_gib:g} GiB",
        gpu,
        resources.service_account or resources.role.rpartition("role/")[2],
        "\n".join(resources.secrets),
    ]


def _short_image(image: str) -> str:
    """Return the last part of an image's name, with the first characters of its digest."""
    name, _, digest = image.rpartition("/")[2].partition("@sha256:")
    return f"{name}@{digest[:SHORT_DIGEST]}" if digest else name


def _starts(schedule: Schedule) -> str:
    """Describe when the flow Retrain starts."""
    parts = []
    if schedule.cron:
        at = _next_start(schedule.cron, schedule.timezone)
        parts.append(f"{schedule.cron} ({schedule.timezone or 'UTC'}), next start {at}")
    if schedule.event:
        parts.append(f"at the event {schedule.event}")
    return "; ".join(parts) or "by hand only"


def _next_start(cron: str, timezone: str) -> str:
    found = [at for each in cron.split("; ") if (at := next_run(each, timezone)) is not None]
    return f"{min(found):%Y-%m-%d %H:%M %Z}" if found else "unknown"


def _code(tags: Mapping[str, str]) -> str:
    """Return the shortened commit, and whether files differed from the commit."""
    changed = {"yes": ", with changes", "no": ""}.get(tags.get(CHANGES, ""), "")
    return f"{tags.get(COMMIT, 'unknown')[:SHORT_DIGEST]}{changed}"


def _settings(deployed: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the digest of the deployed settings, and the digest of the file if they differ."""
    value = deployed.get(SETTINGS, "unknown")
    return value if value == now[SETTINGS] else f"{value}, the file has {now[SETTINGS]}"


def _render(table: Table, lines: list[str]) -> str:
    # Markup is off, because names may contain brackets.
    console = Console(file=io.StringIO(), width=WIDTH, markup=False, emoji=False, color_system=None)
    with console.capture() as capture:
        console.print(table)
        for line in lines:
            console.print(line, soft_wrap=True)
    return capture.get()


def next_run(cron: str, timezone: str, after: datetime | None = None) -> datetime | None:
    """Return the next start time of a schedule, in the schedule's time zone.

    Return None for times that EventBridge reads and croniter does not, such as FRIL, the last
    Friday of a month.

    Args:
        cron: start times in the format of Argo or EventBridge, with names for days of the week.
        timezone: time zone of `cron`; empty for UTC.
        after: time after which to search; None for now.

    Raises:
        ConfigError: the schedule has no next time.
    """
    require_package("croniter", extra="deploy", needed_by="A schedule")
    from croniter import CroniterError, croniter

    # In EventBridge's format, ? means any day, and the sixth field is the year.
    fields = " ".join(cron.replace("?", "*").split()[:5])
    is_eventbridge = len(cron.split()) == EVENTBRIDGE_FIELDS
    start = (after or datetime.now(UTC)).astimezone(ZoneInfo(timezone or "UTC"))
    try:
        found: datetime = croniter(fields, start).get_next(datetime)
    except CroniterError as error:
        readable = ONLY_EVENTBRIDGE.sub("*", fields)
        if is_eventbridge and readable != fields and croniter.is_valid(readable):
            return None
        raise ConfigError(
            f"schedule.cron={cron!r} has no next time: {error}. Correct its fields."
        ) from error
    return found
