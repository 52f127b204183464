"""Addresses of files and folders in S3, with the digest of their content if it is known."""

import re
from dataclasses import dataclass, replace
from typing import Self

from ppo_core.errors import ConfigError

SCHEME = "s3://"

_FORM = re.compile(
    r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<key>[^\x00-\x1f]*?)/?"
    r"(?:#sha256=(?P<digest>[0-9a-f]{64}))?"
)


@dataclass(frozen=True, kw_only=True)
class S3Address:
    """A file or a folder in S3: `s3://BUCKET/KEY`, or `s3://BUCKET/KEY#sha256=DIGEST`."""

    bucket: str
    key: str
    """Key of a file, or common prefix of the keys of a folder, without a slash at the end."""

    digest: str = ""
    """SHA-256 of the manifest that `publish` wrote; if empty, any content is accepted."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address in a text.

        Raises:
            ConfigError: the text is not an address of S3.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"{text!r:.300} is not an address in S3. Write s3://BUCKET/KEY; the name of a "
                "bucket has 3 to 63 lower-case letters, digits, points and hyphens."
            )
        return cls(**found.groupdict(default=""))

    def below(self, name: str) -> "S3Address":
        """Return the address of a file or folder within this folder."""
        return replace(self, key=f"{self.key}/{name}".strip("/"), digest="")

    def pinned(self, digest: str) -> "S3Address":
        """Return this address with the digest of its content."""
        return replace(self, digest=digest)

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        pin = f"#sha256={self.digest}" if self.digest else ""
        return f"{SCHEME}{self.bucket}/{self.key}{pin}"


def is_in_s3(name: str) -> bool:
    """Return whether the name of an input is an address in S3."""
    return name.startswith(SCHEME)
