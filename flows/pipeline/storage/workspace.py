"""The workspace: the folder of caches and runs, and its copy in S3 for steps that share no disk."""

import dataclasses
import os
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.settings.environment import runs_remotely
from pipeline.settings.make_settings import NO_VALUE
from pipeline.settings.settings import Settings
from pipeline.storage.addresses import S3Address, is_in_s3
from ppo_core.errors import ConfigError
from ppo_core.io.folder_cache import sharing

if TYPE_CHECKING:
    # `shared_folder` imports boto3, which a run on one disk does not need.
    from pipeline.storage.shared_folder import SharedFolder

Record = TypeVar("Record")

FETCHED = "cache/fetched"
"""Folder for files from S3, within the workspace."""

ROWS = "rows"
"""Subfolder of the cache for encoded rows; it exists only in S3."""

MODELS = ("policy", "reward_model")
"""Settings that name models."""

REGISTRY = "models:/"
"""Beginning of the address of a registered version."""

SUBFOLDER = "rlhf"
"""Folder of the workspace below Metaflow's data store."""

_fetched: dict[tuple[str, str, bool], str] = {}
"""Local paths of the files and folders that this process has fetched and verified. A key is the
workspace, the address, and whether the weights were fetched."""

_PINNED = re.compile(r"s3://[^\x00-\x1f#]+?#sha256=[0-9a-f]{64}")


@dataclass(frozen=True)
class Workspace:
    """The folder on this machine, and its copy in S3.

    A record that one step passes to another contains S3 addresses instead of paths. Without a copy
    in S3, all steps share the folder, and records contain paths.
    """

    folder: str
    """The folder on each machine: `output_dir` of the run."""

    store: str = ""
    """Address of the copy in S3; empty if all steps share the folder."""

    @property
    def root(self) -> Path:
        """The folder as an absolute path."""
        return Path(self.folder).absolute()

    @property
    def cache(self) -> Path:
        """Folder of models and data sets that several runs share."""
        return self.root / "cache"

    def folder_of_run(self, number: str) -> Path:
        """Return the folder of a run; `number` is Metaflow's id of the run."""
        return self.root / "runs" / number

    def check_access(self) -> None:
        """Raise if the steps cannot write into the copy in S3; see `check_store`.

        Raises:
            ConfigError: S3 refuses to write, read or remove an object.
            StorageError: S3 does not answer.
        """
        if self.store:
            from pipeline.storage.access import check_store

            check_store(S3Address.parse(self.store))

    def publish(self, path: Path) -> str:
        """Publish a file or folder of the workspace; return its address.

        The address of a file in the cache contains no digest, so `find` needs only the path. The
        address of a result of a run contains a digest, because a repeated step may produce another
        result.

        Raises:
            ConfigError: S3 refuses the access.
            StorageError: a file could not be transferred.
        """
        from pipeline.storage.upload import publish, publish_by_content

        is_cached = path.absolute().is_relative_to(self.cache)
        return str((publish if is_cached else publish_by_content)(path, self.address(path)))

    def publish_input(self, path: Path) -> str:
        """Publish a user's file or folder; return its address.

        Inputs with equal names and equal content have equal addresses.

        Raises:
            ConfigError: S3 refuses the access.
            StorageError: a file could not be transferred.
        """
        from pipeline.storage.upload import publish_by_content

        # A fetched folder is named after its content, not after the input.
        name = Path(original_names(str(path)).partition("#")[0]).name
        return str(publish_by_content(path, S3Address.parse(self.store).below(f"inputs/{name}")))

    def find(self, path: Path) -> str | None:
        """Return the address of `path` if an earlier run has published it; otherwise None."""
        if not self.store:
            return None
        from pipeline.storage.upload import find

        found = find(self.address(path))
        return None if found is None else str(found)

    def fetch(self, name: str, *, weights: bool = True) -> str:
        """Fetch the file or folder at an S3 address; return its local path.

        A name that is not an S3 address is returned unchanged.
        Without `weights`, the files with the weights of a model are left out.

        Raises:
            DataError: nothing is stored at the address, or the content has changed.
            ConfigError: S3 refuses the access.
            StorageError: a file could not be transferred.
        """
        if not is_in_s3(name):
            return name
        key = str(self.root), name, weights
        if key not in _fetched:
            from pipeline.storage.download import fetch
            from pipeline.storage.local_cache import LocalCache

            cache = LocalCache(self.root / FETCHED)
            _fetched[key] = str(fetch(S3Address.parse(name), cache, weights=weights))
        return _fetched[key]

    def read(self, address: str, name: str) -> bytes:
        """Return the content of a small file of a published folder, without the other files.

        Raises:
            DataError, ConfigError, StorageError: see `fetch`.
        """
        from pipeline.storage.download import read_file

        return read_file(S3Address.parse(address), name)

    def publish_files(self, record: Record) -> Record:
        """Publish the files of a record; return the record with their addresses.

        The attribute FILE_FIELDS of the record's class lists the fields with paths.
        """
        if not self.store:
            return record
        return _changed(record, self._publish_text)

    def fetch_files(self, record: Record) -> Record:
        """Fetch the files of a record; return the record with their paths on this machine.

        Of models in `Settings`, only the configuration and the tokenizer are fetched. A step that
        needs the weights calls `fetch` with the model's name, or receives a `PreparedModel`.
        """
        if not self.store:
            return record
        return _changed(record, self._fetch_text)

    def shared_folder(self, folder: Path, name: str) -> "SharedFolder":
        """Return a folder in the workspace that several steps write, one after another.

        Its copy in S3 is at the address of `folder / name`.
        """
        from pipeline.storage.shared_folder import SharedFolder

        return SharedFolder(folder, self.address(folder / name))

    def sharing_rows(self) -> AbstractContextManager[None]:
        """Return a context in which encoded rows are shared through S3.

        Without a store, the context does nothing: the rows are in the cache on the shared disk.
        """
        if not self.store:
            return nullcontext()
        from pipeline.storage.folder_copies import FolderCopies

        return sharing(FolderCopies(self.address(self.cache / ROWS)))

    def address(self, path: Path) -> S3Address:
        """Return the address in S3 of a path within the workspace."""
        relative = path.absolute().relative_to(self.root).as_posix()
        return S3Address.parse(self.store).below(relative)

    def _publish_text(self, record: Any, name: str, value: str) -> str:
        """Return the address of a file that the step made or fetched; return other texts as is."""
        if name not in getattr(record, "FILE_FIELDS", ()):
            return value
        if address := _addresses().get(value):
            return address
        path = Path(value)
        return self.publish(path) if path.is_absolute() and path.exists() else value

    def _fetch_text(self, record: Any, name: str, value: str) -> str:
        weights = not (isinstance(record, Settings) and name in MODELS)
        return _PINNED.sub(lambda found: self.fetch(found[0], weights=weights), value)


def workspace_of(settings: Settings) -> Workspace:
    """Return the workspace of a run.

    Raises:
        ConfigError: the store is not an address in S3, or the step runs on a machine of a scheduler
            and there is no store.
    """
    store = settings.store
    if store == NO_VALUE:
        store = ""
    elif not store and runs_remotely():
        root = os.environ.get("METAFLOW_DATASTORE_SYSROOT_S3", "")
        if not is_in_s3(root):
            raise ConfigError(
                "The steps run on different machines, and Metaflow's data store is not in S3. Set "
                "store to an address s3://BUCKET/PREFIX for the files of the run. If output_dir is "
                f"on a disk that all machines share, set store to {NO_VALUE!r} instead."
            )
        store = f"{root.rstrip('/')}/{SUBFOLDER}"
    if store:
        S3Address.parse(store)
    return Workspace(settings.output_dir, store)


def original_names(text: str) -> str:
    """Return a text in which addresses replace the paths that this process has fetched."""
    for path, address in _addresses().items():
        text = text.replace(path, address)
    return text


def _addresses() -> dict[str, str]:
    """Return the address of each path that this process has fetched."""
    return {path: address for (_, address, _), path in _fetched.items()}


def is_address(name: str) -> bool:
    """Return whether a model is in S3 or in the registry, and not on this machine or the hub."""
    return is_in_s3(name) or name.startswith(REGISTRY)


def _changed(record: Record, change: Any) -> Record:
    """Apply `change` to the texts of a record or a tuple of records, also in inner records."""
    if isinstance(record, tuple):
        return tuple(_changed(each, change) for each in record)  # type: ignore[return-value]
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        return record
    fields = {
        one.name: _changed_value(record, one.name, getattr(record, one.name), change)
        for one in dataclasses.fields(record)
    }
    same = all(fields[name] is getattr(record, name) for name in fields)
    return record if same else dataclasses.replace(record, **fields)


def _changed_value(record: Any, name: str, value: Any, change: Any) -> Any:
    if isinstance(value, str):
        changed = change(record, name, value)
        return value if changed == value else changed
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        several = [change(record, name, one) for one in value]
        return value if several == value else several
    if isinstance(value, dict) and all(isinstance(one, str) for one in value.values()):
        named = {key: change(record, name, one) for key, one in value.items()}
        return value if named == value else named
    return _changed(value, change)
