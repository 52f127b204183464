"""A folder of small files that several steps of a run change, one step after another."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.storage.addresses import S3Address
from pipeline.storage.download import fetch_into, published_version
from pipeline.storage.manifest import StoredFile
from pipeline.storage.upload import remove_unneeded, replace
from ppo_core.errors import PPOError
from ppo_core.io.atomic_files import write_atomically


@contextmanager
def written_at_end(write: Callable[[], None]) -> Iterator[None]:
    """Call `write` at the end of the context.

    If the context raises an error, an error of `write` is only printed, because the error of the
    context decides whether the step is retried.
    """
    try:
        yield
    except BaseException:
        try:
            write()
        except (PPOError, OSError) as error:
            print(f"Warning: The last files were not copied to S3: {error}", flush=True)
        raise
    write()


class SharedFolder:
    """A folder on this machine, and its newest content in S3.

    One process at a time changes the folder. If another process has written since the last read,
    `write` fails: see `replace`.

    The file `.FOLDER.version` beside the folder has the version in S3 that this machine read or
    wrote last. It shows whether another machine has continued the run since then.
    """

    def __init__(self, folder: Path, address: S3Address) -> None:
        """Use `folder`; `read` creates it."""
        self._folder, self._address = folder, address
        self._known = folder.with_name(f".{folder.name}.version")
        self._version = ""
        self._files: dict[str, StoredFile] = {}

    @property
    def names(self) -> Collection[str]:
        """Names of the newest files that this process has seen or written."""
        return self._files.keys()

    def read(self) -> None:
        """Fetch the newest files into the folder, unless it has files from an earlier attempt.

        If another machine has written since that attempt, its files replace the earlier files.

        Raises:
            DataError, StorageError: see `fetch_into`.
        """
        is_behind = self.is_behind()
        is_new = not self._folder.exists() or not any(self._folder.iterdir())
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._files and is_new:
            # Rename the complete folder, because this process may be killed during the fetch.
            partial = self._folder.with_name(f".{self._folder.name}.part")
            fetch_into(partial, self._address, self._files)
            partial.rename(self._folder)
        elif is_behind:
            fetch_into(self._folder, self._address, self._files)
        self._remember_version()

    def is_behind(self) -> bool:
        """Return whether another machine has written since this machine read or wrote last.

        False on a machine that has neither read nor written the folder.

        Raises:
            StorageError: S3 does not answer.
        """
        self.look()
        if not self._known.exists():
            return False
        return self._version not in ("", self._known.read_text(encoding="utf-8"))

    def look(self) -> Collection[str]:
        """Return the names of the newest files; after this call, `write` may replace these files.

        Raises:
            StorageError: S3 does not answer.
        """
        found = published_version(self._address)
        if found is not None:
            self._files, self._version = found[0].files, found[1]
        return self._files.keys()

    def read_files(self, names: Collection[str]) -> None:
        """Fetch some of the newest files into the folder.

        Raises:
            DataError, StorageError: see `read`.
        """
        fetch_into(self._folder, self._address, names)

    def write(self, files: Mapping[str, Path], keep: Collection[str] = ()) -> None:
        """Publish these files as the newest content of the folder.

        Args:
            files: the files by name in the folder.
            keep: names of published files that stay, although `files` does not contain them.

        Raises:
            StorageError: another process has written since this process read, or a file could not
                be transferred.
            OSError: a file cannot be read.
        """
        kept = {name: file for name, file in self._files.items() if name in keep}
        manifest, self._version = replace(files, self._address, self._version, kept=kept)
        self._files = manifest.files
        # First remember the version: this process may be killed while objects are removed.
        self._remember_version()
        remove_unneeded(manifest, self._address)

    def _remember_version(self) -> None:
        write_atomically(self._known, self._version)
