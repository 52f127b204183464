"""`make audit`: ask OSV for known vulnerabilities of the locked packages.

Further arguments go to pip-audit.

The packages of cpu.txt and build.txt are in dev.txt and cuda.txt, in the same versions. OSV may not
know the version of torch in dev.txt, which ends in +cpu, but knows the same release in cuda.txt.
"""

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from ppo_core.errors import ConfigError

FOLDER = Path(__file__).parent
MOST_DAYS = 180
"""Largest number of days for which a vulnerability is ignored."""


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """A vulnerability that is not reported."""

    id: str
    """Id in OSV, or one of its aliases."""

    reason: str
    """Why the project is not affected."""

    expires: date
    """Last day on which the vulnerability is ignored."""


def read_ignored(file: Path, today: date) -> list[Ignored]:
    """Return the vulnerabilities that a file lists.

    Raises:
        ConfigError: an entry is incomplete, has expired, or expires too late.
    """
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return [_read_entry(entry, file, today) for entry in table.get("ignored", [])]


def _read_entry(entry: dict[str, object], file: Path, today: date) -> Ignored:
    kinds = {"id": str, "reason": str, "expires": date}
    right = entry.keys() == kinds.keys() and all(
        type(entry[name]) is kind and entry[name] for name, kind in kinds.items()
    )
    if not right:
        raise ConfigError(
            f"{file}: the entry {entry} must have an id and a reason, which are texts, and a date "
            "`expires`, or nobody would look at it again. Complete it."
        )
    found = Ignored(**entry)  # type: ignore[arg-type]
    if not today <= found.expires <= today + timedelta(days=MOST_DAYS):
        raise ConfigError(
            f"{file}: {found.id} expires on {found.expires}, which is not within {MOST_DAYS} days "
            f"from today, {today}. Update the package and `make lock`, or look at the reason "
            "again and set a new date."
        )
    return found


def main(arguments: Sequence[str]) -> int:
    """Audit the lock files; return 0 if no vulnerability is known that is not ignored."""
    try:
        ignored = read_ignored(FOLDER / "ignored.toml", datetime.now(UTC).date())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    options = [word for one in ignored for word in ("--ignore-vuln", one.id)]
    # pip-audit takes no package twice, and both files have most of the packages.
    return max(_audit(FOLDER / name, [*options, *arguments]) for name in ("dev.txt", "cuda.txt"))


def _audit(lock: Path, options: Sequence[str]) -> int:
    """Run pip-audit for one lock file, and return its exit status."""
    print(f"{lock.name}:", flush=True)
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", "osv", "--strict"]
    command += ["--progress-spinner", "off", "--disable-pip", "--requirement", str(lock)]
    return subprocess.run([*command, *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
