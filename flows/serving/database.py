"""Check an MLflow database on disk before MLflow opens it.

Without this check, MLflow would create missing folders and write its tables into the database of
another program. It would also try for two minutes to open an unusable file.
"""

import os
import sqlite3
from pathlib import Path

from ppo_core.errors import ModelError
from ppo_core.errors.redaction import redact

SQLITE_HEADER = b"SQLite format 3\0"
"""First bytes of a sqlite database file that is not empty."""

MLFLOW_TABLE = "experiments"
"""The table that MLflow creates first."""


def check_database(uri: str, *, must_exist: bool = False, is_written: bool = False) -> None:
    """Raise if `uri` is the address of a sqlite file that MLflow cannot use.

    Args:
        uri: MLflow's tracking or registry address; only addresses of sqlite files are checked.
        must_exist: whether to refuse a missing or empty file, in which MLflow would create a
            database.
        is_written: whether to refuse a file that is not writable.

    Raises:
        ModelError: the file cannot be used; the message states the reason and the remedy.
    """
    path = sqlite_file(uri)
    if path is None:
        return
    try:
        fault = _fault(path, must_exist=must_exist, is_written=is_written)
    # Python 3.11 to 3.13 raise if a folder may not be entered.
    except OSError as error:
        fault = f"{path} cannot be read: {error.strerror}"
    if fault is not None:
        raise ModelError(
            f"MLflow cannot use the database {redact(uri)}: {fault}. Correct "
            "MLFLOW_TRACKING_URI (or MLFLOW_REGISTRY_URI, if it is set), for example to "
            "sqlite:////absolute/path/mlflow.db or to the address of an MLflow server."
        )


def sqlite_file(uri: str) -> Path | None:
    """Return the file of a sqlite address.

    The result is None for any other address, for a database in memory, and for a name that begins
    with `file:`.
    """
    scheme, found, rest = uri.partition(":///")
    name = rest.partition("?")[0]
    if not found or not scheme.startswith("sqlite") or name in ("", ":memory:"):
        return None
    return None if name.startswith("file:") else Path(name)


def _fault(path: Path, *, must_exist: bool, is_written: bool) -> str | None:
    """Return the reason why a file cannot be used; None if it can be used."""
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.is_dir():
        return f"{path} is a folder"
    if is_written and not os.access(path if path.exists() else folder, os.W_OK):
        return f"{path if path.exists() else folder} is not writable"
    if not path.exists() or path.stat().st_size == 0:
        return f"there is no database in {path}" if must_exist else None
    if not path.is_file():
        return f"{path} is not a file"
    return _fault_of_content(path)


def _fault_of_content(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            if file.read(len(SQLITE_HEADER)) != SQLITE_HEADER:
                return f"{path} is not a sqlite database"
        tables = _tables(path)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return None  # another process is writing; MLflow waits for its turn
        return f"{path} cannot be read: {error}"
    if tables and MLFLOW_TABLE not in tables:
        return f"{path} is a database of another program, with the table {min(tables)!r}"
    return None


def _tables(path: Path) -> set[str]:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)
    try:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {name for (name,) in found}
    finally:
        connection.close()
