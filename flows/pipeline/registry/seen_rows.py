"""Find the rows that a version was made from, and the versions that were made from a row."""

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import pyarrow
from pyarrow import parquet

from pipeline.inputs.row_digests import ROWS_FILE, count_seen
from pipeline.registry.aliases import CHAMPION, read_aliases
from pipeline.tracking.mlflow_client import connect, explained
from ppo_core.errors import ModelError
from serving.artifact_store import download_file, open_store, prepare_mlflow
from serving.manifest import MANIFEST_TAG

ANSWER_SECONDS = 300
"""Maximum seconds for each answer of MLflow or of the artifact store."""


@explained()
def read_rows_of(name: str, version: int) -> pyarrow.Table | None:
    """Return the digests of the rows of a version, see ROWS_FILE.

    Return None if the version has no such file, or no manifest that lists its files.

    Raises:
        ModelError: there is no such version, or its file cannot be read or was changed.
    """
    prepare_mlflow()
    found = connect().get_model_version(name, str(version))
    what = f"Version {version} of {name!r}"
    digest = found.tags.get(MANIFEST_TAG)
    if digest is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(found, what, ANSWER_SECONDS)
        if not download_file(store, ROWS_FILE, Path(folder), digest, what, ANSWER_SECONDS):
            return None
        # Read into memory, because the temporary file is removed.
        return parquet.read_table(Path(folder) / ROWS_FILE, memory_map=False)


def require_rows_of(name: str, version: int) -> pyarrow.Table:
    """Return the digests of the rows of a version.

    Raises:
        ModelError: see `read_rows_of`, or the version has no digests.
    """
    found = read_rows_of(name, version)
    if found is None:
        raise ModelError(
            f"Version {version} of {name!r} has no {ROWS_FILE}: it was registered by an older "
            "release, which kept no digests of rows. The tags of the version name its data sets."
        )
    return found


def describe_versions_that_saw(name: str, rows: Sequence[Collection[bytes]]) -> list[str]:
    """Return a line for each version that was made from one of the rows, the oldest first.

    If there is no such version, a line says so. The last line names the versions without digests,
    if there are any.

    Args:
        name: name of the registered model, which may not exist yet.
        rows: digests of each row, see `digests_of_raw`.

    Raises:
        ModelError: see `read_rows_of`.
    """
    champion, lines, unknown = read_aliases(name).get(CHAMPION), [], []
    for version in _versions(name):
        table = read_rows_of(name, version)
        if table is None:
            unknown.append(str(version))
        elif seen := count_seen(table, rows):
            number = seen.pop("")
            uses = ", ".join(f"{use} {count}" for use, count in seen.items())
            mark = " (champion)" if version == champion else ""
            lines.append(f"version {version}{mark} saw {number} of {len(rows)} rows: {uses}")
    if not lines:
        lines.append(f"no version of {name} is known to have seen any of {len(rows)} rows")
    if unknown:
        lines.append(
            "versions without row digests, which may also have seen some of the rows: "
            + ", ".join(unknown)
        )
    return lines


@explained()
def _versions(name: str) -> list[int]:
    found = connect().search_model_versions(f"name = '{name}'")
    return sorted(int(one.version) for one in found)
