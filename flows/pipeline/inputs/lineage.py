"""Where a run comes from: code, packages, settings and data, as plain texts."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.inputs.cache import digest_of
from serving.redaction import without_credentials

if TYPE_CHECKING:
    # Every step reads its FlowRun, and not all of them need the library of data sets.
    from pipeline.inputs.rows import Rows

FLOW_RUN = "flow_run"
"""Tag of runs and versions in MLflow: id of the run of the flow."""

UNKNOWN = "unknown"
"""Of code that lies in no git repository, or where git cannot be asked."""

GIT_SECONDS = 30
"""Seconds that git may take for one answer."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set that a run read."""

    name: str
    """Which of the run's inputs it is."""

    source: str
    """Where it was read, without what an address may hold of credentials."""

    digest: str
    """Digest of its usable rows."""

    rows: int
    """How many these are."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Where a run comes from."""

    tags: dict[str, str]
    """Names and texts, see `trace`."""

    packages: str
    """Every installed package, one `name==version` a line."""

    data: list[DataSet]
    """The data sets, in the order in which they were given."""


def trace(*, flow_run: str, settings: Mapping[str, Any], data: Mapping[str, "Rows"]) -> Lineage:
    """Where a run comes from, under names that stay the same.

    | tag | what it says |
    |---|---|
    | `flow_run` | the run of the flow |
    | `git_commit` | commit of the code, `unknown` outside of a repository |
    | `git_changes` | whether files differ from that commit: yes, no or `unknown` |
    | `python` | version of the interpreter |
    | `packages_digest` | SHA-256 of the list of packages |
    | `settings_digest` | digest of the complete settings |
    | `seed` | of the run |
    | `data/NAME` | digest of the usable rows of an input |

    Args:
        flow_run: id of the run.
        settings: as nested plain dicts, those that `settings_file` writes.
        data: the rows by the names of the inputs.
    """
    packages = installed_packages()
    commit, changes = git_state(Path(__file__))
    tags = {
        FLOW_RUN: flow_run,
        "git_commit": commit,
        "git_changes": changes,
        "python": platform.python_version(),
        "packages_digest": hashlib.sha256(packages.encode()).hexdigest(),
        "settings_digest": digest_of(settings),
        "seed": str(settings["seed"]),
        **{f"data/{name}": rows.digest for name, rows in data.items()},
    }
    return Lineage(
        tags=tags,
        packages=packages,
        data=[
            DataSet(
                name=name,
                source=without_credentials(rows.source),
                digest=rows.digest,
                rows=len(rows.usable),
            )
            for name, rows in data.items()
        ],
    )


def git_state(file: Path) -> tuple[str, str]:
    """The commit that a file is of, and whether its repository has changes: yes or no.

    Files that git does not know are no changes. Both are `unknown` where the file is in no
    repository, in one that does not know it (an installed copy in a folder of another project),
    or where git is missing or does not answer.
    """
    if _git(file, "ls-files", "--error-unmatch", file.name) is None:
        return UNKNOWN, UNKNOWN
    commit = _git(file, "rev-parse", "HEAD")
    changes = _git(file, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return UNKNOWN, UNKNOWN
    return commit.strip(), "yes" if changes else "no"


def installed_packages() -> str:
    """Every installed package as `name==version`, sorted, one a line."""
    versions: dict[str, str] = {}
    for package in distributions():
        # An import takes the first of two copies; what an interrupted installation left has none.
        if name := package.metadata["Name"]:
            versions.setdefault(name.lower(), f"{name}=={package.version}")
    return "".join(f"{versions[name]}\n" for name in sorted(versions))


def _git(file: Path, *words: str) -> str | None:
    """What git prints about the repository of a file; None where it fails or is missing."""
    # Inside of a hook these name the repository that is committed to, whatever the folder.
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    try:
        ran = subprocess.run(
            # Without the lock that a look at the state would take for a moment.
            ["git", "--no-optional-locks", *words],
            cwd=file.parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout
