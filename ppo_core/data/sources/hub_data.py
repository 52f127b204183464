"""Load or copy one split of a data set of the Hugging Face Hub, or pin it to a commit."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import HfApi

from ppo_core.errors import DataError, library_errors

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubData:
    """The name of one split of a data set of the hub: `ORG/NAME@REVISION:CONFIG/SPLIT`."""

    given: str
    """The name that a user gave."""

    repository: str
    revision: str | None
    """Branch, tag or commit; None for the newest commit."""

    config: str | None
    """Configuration, for a data set with several configurations."""

    split: str
    """Name of a split, or a slice of a split."""

    def load(self) -> Any:
        """Download the split, unless it is in the cache, and return it as a `datasets.Dataset`.

        Raises:
            DataError: the hub has no such data set, configuration or split, or cannot be reached.
        """
        with self._explained():
            return datasets.load_dataset(
                self.repository, self.config, split=self.split, revision=self.revision
            )

    def pinned(self) -> str:
        """Return the name with its revision replaced by the current commit of the revision.

        A name that already has a commit is returned unchanged. Offline, every name is returned
        unchanged, because `datasets` then reads only its cache, which does not change.

        Raises:
            DataError: the hub has no such data set, or cannot be reached.
        """
        if datasets.config.HF_HUB_OFFLINE or _COMMIT.fullmatch(self.revision or ""):
            return self.given
        with self._explained():
            hub = HfApi(endpoint=datasets.config.HF_ENDPOINT)
            commit = hub.dataset_info(self.repository, revision=self.revision).sha
        _, colon, split = self.given.partition(":")
        return f"{self.repository}@{commit}{colon}{split}"

    def save(self, folder: Path) -> None:
        """Write the split into a folder, so that later runs can read it without the hub.

        Raises:
            DataError: see `load`.
            OSError: the folder cannot be written.
        """
        without_media(self.load()).save_to_disk(str(folder))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        failure = (
            f"'{self.given}' is not a local file or folder ({absolute_path(self.given)} does not "
            f"exist), and no data set of this name with a split '{self.split}' could be loaded "
            "from the hub"
        )
        with library_errors(DataError, failure, "Check the path, or the hub id."):
            yield


def without_media(loaded: Any) -> Any:
    """Return a data set without columns of media, such as images.

    `datasets` would open the files and addresses that these columns name.
    """
    media = [column for column, feature in loaded.features.items() if _is_media(feature)]
    return loaded.remove_columns(media)


def absolute_path(name: str) -> str:
    """Return the absolute path of a name, cut to 300 characters for a message."""
    return f"{Path(name).absolute()!s:.300}"


def _is_media(feature: Any) -> bool:
    if isinstance(feature, dict):
        return any(map(_is_media, feature.values()))
    if isinstance(feature, list | tuple):
        return any(map(_is_media, feature))
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_media(inner)
    return hasattr(feature, "decode_example") and type(feature).__name__ != "Json"
