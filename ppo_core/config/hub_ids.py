"""Split a model's name, such as `org/name@REVISION`, into a folder or hub id and a revision."""

import os
import re
from pathlib import Path

from ppo_core.errors import ConfigError

MAIN = "main"
"""Default revision: the newest commit of the main branch, which may change between two runs."""

_WITH_REVISION = re.compile(r"([^@]+)@(\w[\w.+/-]*)", re.ASCII)


def split_revision(path: str | Path, revision: str | None = None) -> tuple[str | Path, str]:
    """Return the folder or hub id of a model, and the branch, tag or commit to read.

    A name that exists on this machine is a local path, even if it contains an `@`.

    Args:
        path: a folder, or a hub id with or without `@REVISION`.
        revision: the revision from another setting; None if there is none.

    Raises:
        ConfigError: both arguments name a revision.
    """
    found = None if os.path.lexists(path) else _WITH_REVISION.fullmatch(str(path))
    if found is None or ".." in found[2]:
        return path, revision or MAIN
    if revision is not None:
        raise ConfigError(
            f"'{path}' and the setting revision={revision!r} both name a revision. Remove one."
        )
    return found[1], found[2]


def with_revision(path: str, revision: str | None) -> str:
    """Add a revision from another setting to a hub id; return a local path unchanged.

    Raises:
        ConfigError: the name and the setting both name a revision.
    """
    source, found = split_revision(path, revision)
    return path if revision is None or os.path.lexists(path) else f"{source}@{found}"
