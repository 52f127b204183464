"""Small files that the steps of a run change one after another."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.storage.addresses import S3Address
from pipeline.storage.download import fetch_into
from pipeline.storage.manifest import MANIFEST
from pipeline.storage.objects import read_object
from pipeline.storage.upload import replace


class SharedFolder:
    """A folder on this machine, and its newest content in S3.

    One process at a time changes it. A process that was overtaken cannot write: see `replace`.
    """

    def __init__(self, folder: Path, address: S3Address) -> None:
        """Use the folder, which exists after `read`."""
        self._folder, self._address = folder, address
        self._version = ""

    def read(self) -> None:
        """Write the newest files into the folder, unless an earlier attempt here left newer ones.

        Raises:
            DataError: a file is not that of the manifest.
            StorageError: a file could not be transferred.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest = read_object(self._address.below(MANIFEST))
        if manifest is None:
            return
        self._version = manifest[1]
        if not any(self._folder.iterdir()):
            fetch_into(self._folder, self._address)

    def write(self, files: Sequence[Path]) -> None:
        """Make these files of the folder the newest ones.

        Raises:
            StorageError: another process has written since, or a file could not be transferred.
        """
        named = {path.relative_to(self._folder).as_posix(): path for path in files}
        self._version = replace(named, self._address, self._version)
