"""Small files that the steps of a run change one after another."""

from collections.abc import Mapping
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
        manifest = read_object(self._address.below(MANIFEST))
        is_new = not self._folder.exists() or not any(self._folder.iterdir())
        self._folder.mkdir(parents=True, exist_ok=True)
        if manifest is None:
            return
        self._version = manifest[1]
        if is_new:
            # A process that is killed meanwhile leaves a part that no other step takes for all.
            partial = self._folder.with_name(f".{self._folder.name}.part")
            fetch_into(partial, self._address)
            partial.rename(self._folder)

    def write(self, files: Mapping[str, Path]) -> None:
        """Make these files, by their names in the folder, the newest ones.

        Raises:
            StorageError: another process has written since, or a file could not be transferred.
            OSError: a file cannot be read.
        """
        self._version = replace(files, self._address, self._version)
