"""Record the lineage of a run: its code, packages, settings and data."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metaflow.meta_files import read_info_file

from pipeline.storage.workspace import original_names
from ppo_core.errors.redaction import redact
from ppo_core.io.folder_cache import digest_of

if TYPE_CHECKING:
    # Every step imports this module, but not every step needs the `datasets` library.
    from ppo_core.data.rows.read_rows import Rows

FLOW_RUN = "flow_run"
"""MLflow tag, of runs and of registered versions, with the id of the flow's run."""

EVALUATION_ROWS = "evaluation_rows"
"""MLflow tag, of runs and of registered versions, with the digest of the evaluation rows before
copies of training texts are left out. The digest `data/eval-prompts` of the remaining rows changes
if the training data contain one more copy."""

ORIGIN = (
    "data/",
    "git_",
    "guard/",
    "judge/",
    "model/base",
    "model/reward_model",
    "reward/",
    "settings_digest",
    "seed",
)
"""Prefixes of the tags that describe the inputs of a run: code, settings, data, given models, and
functions of the user."""

UNKNOWN = "unknown"
"""Tag value if the code is outside of a git repository or git does not answer."""

GIT_SECONDS = 30
"""Timeout of a git command, in seconds."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set that a run read."""

    name: str
    """Use of the data set in the run."""

    source: str
    """File, folder or hub id of the data set, without credentials."""

    digest: str
    """Digest of the usable rows."""

    rows: int
    """Number of usable rows."""

    left_out: dict[str, int] = field(default_factory=dict)
    """Reason -> number of rows that were left out for this reason."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """The lineage of a run."""

    tags: dict[str, str]
    """MLflow tags, see `trace`."""

    packages: str
    """All installed packages, one `name==version` per line."""

    data: list[DataSet]
    """The data sets in the order of the argument `data` of `trace`."""


def trace(*, flow_run: str, settings: Mapping[str, Any], data: Mapping[str, "Rows"]) -> Lineage:
    """Return the lineage of a run.

    | tag | value |
    |---|---|
    | `flow_run` | id of the run |
    | `git_commit` | commit of the code, or `unknown` |
    | `git_changes` | whether tracked files differ from the commit: yes, no or `unknown` |
    | `python` | version of the interpreter |
    | `packages_digest` | SHA-256 of the list of packages |
    | `settings_digest` | digest of all settings but `hardware` |
    | `seed` | seed of the run |
    | `data/NAME` | digest of the usable rows of an input |

    Args:
        flow_run: id of the run.
        settings: the settings as nested dicts, before `prepare_inputs`.
        data: the rows of each data set, by the use of the data set.
    """
    packages = installed_packages()
    commit, changes = git_state(Path(__file__))
    tags = {
        FLOW_RUN: flow_run,
        "git_commit": commit,
        "git_changes": changes,
        "python": platform.python_version(),
        "packages_digest": hashlib.sha256(packages.encode()).hexdigest(),
        # `hardware` has GPUs and prices, on which no result depends.
        "settings_digest": digest_of({k: v for k, v in settings.items() if k != "hardware"}),
        "seed": str(settings["seed"]),
        **{f"data/{name}": rows.digest for name, rows in data.items()},
    }
    return Lineage(
        tags=tags,
        packages=packages,
        data=[
            DataSet(
                name=name,
                source=redact(original_names(rows.source)),
                digest=rows.digest,
                rows=len(rows),
                left_out=rows.left_out,
            )
            for name, rows in data.items()
        ],
    )


def is_origin(tag: str) -> bool:
    """Return whether a tag describes an input of a run: code, settings, data or a given model.

    The tags of Python and its packages describe the image, and do not count.
    """
    return tag.startswith(ORIGIN)


def is_input(tag: str) -> bool:
    """Return whether a tag describes an input of a run, or is the version of Python."""
    return tag == "python" or is_origin(tag)


def git_state(file: Path) -> tuple[str, str]:
    """Return the commit of a file's repository, and whether tracked files changed: yes or no.

    In a code package of Metaflow, return the values that the package contains. Both values are
    `unknown` if no repository tracks the file, for example in an installed copy, or if git is
    missing or does not answer.
    """
    if _git(file, "ls-files", "--error-unmatch", file.name) is None:
        return _packaged_state()
    commit = _git(file, "rev-parse", "HEAD")
    changes = _git(file, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changes is None:
        return UNKNOWN, UNKNOWN
    return commit.strip(), "yes" if changes else "no"


def _packaged_state() -> tuple[str, str]:
    """Return the commit in the code package of this process, and whether files had changed."""
    made = read_info_file() or {}
    if "commit_sha" not in made:
        return UNKNOWN, UNKNOWN
    return str(made["commit_sha"]), "yes" if made.get("has_uncommitted_changes") else "no"


def installed_packages() -> str:
    """Return all installed packages as sorted lines `name==version`."""
    return "".join(f"{one.metadata['Name']}=={one.version}\n" for one in installed_distributions())


def installed_distributions() -> list[Distribution]:
    """Return the metadata of all installed packages, sorted by name."""
    found: dict[str, Distribution] = {}
    for package in distributions():
        # Of two copies, Python imports the first. A broken installation may have no name.
        if name := package.metadata["Name"]:
            found.setdefault(name.lower(), package)
    return [found[name] for name in sorted(found)]


def _git(file: Path, *words: str) -> str | None:
    """Return the output of a git command in the folder of a file; None if it fails."""
    # In a git hook, GIT_ variables would override the folder.
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    try:
        ran = subprocess.run(
            # Without this option, `status` would lock the index of the repository.
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
