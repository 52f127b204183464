"""Copies in S3 of cached folders, for other machines and later runs."""

import shutil
from pathlib import Path
from uuid import uuid4

from pipeline.storage.addresses import S3Address
from pipeline.storage.download import fetch_into, published_manifest
from pipeline.storage.upload import publish
from ppo_core.io.folder_cache import publish_folder


class FolderCopies:
    """Copies of cache folders; the name of a folder has a digest of the inputs that made it."""

    def __init__(self, place: S3Address) -> None:
        """Keep the copies below an address."""
        self._place = place

    def fetch(self, folder: Path) -> None:
        """Create the folder from its copy, and verify the digests; do nothing if there is no copy.

        Raises:
            StorageError: a file could not be transferred.
        """
        address = self._place.below(folder.name)
        manifest = published_manifest(address)
        if manifest is None:
            return
        # Several processes may fetch the same folder.
        unfinished = folder.with_name(f".{folder.name}.{uuid4().hex}")
        try:
            fetch_into(unfinished, address, manifest.files)
            publish_folder(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def publish(self, folder: Path) -> None:
        """Copy a folder to S3, unless S3 has a copy of this name.

        Raises:
            StorageError: a file could not be transferred.
        """
        publish(folder, self._place.below(folder.name))
