"""Check and download addresses of data files, such as https://; a setting must allow them."""

import re
import time
from http.client import HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.request import HTTPRedirectHandler, build_opener

from ppo_core.errors import DataError, library_errors

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")

MAX_DOWNLOAD_BYTES = 1 << 30
DOWNLOAD_SECONDS = 600.0
"""Maximum duration of a download, in seconds."""

SILENCE_SECONDS = 30.0
"""Maximum wait for a connection, and for the next bytes, in seconds."""


def is_data_address(name: str) -> bool:
    """Return whether a data set's name is an address or a chain of addresses (`zip::https://`)."""
    return _ADDRESS.match(name) is not None or "::" in name


def require_allowed(address: str, *, allowed: bool) -> None:
    """Raise unless the setting `allow_data_urls` permits addresses.

    Raises:
        DataError: addresses are not allowed.
    """
    if not allowed:
        raise DataError(
            f"'{address}' is an address, so another machine would choose the data of the training, "
            "and could change the data between two runs. Download the file and name the copy, or "
            "set allow_data_urls to true."
        )


def download(address: str, folder: Path) -> Path:
    """Return the downloaded file of an http or https address. Redirects are not followed.

    Raises:
        DataError: the address names a user; the server refuses or redirects the request, or does
            not answer; or the file is too large, or its download takes too long.
    """
    suffixes = Path(address.partition("?")[0]).suffixes[-2:]
    path = folder / f"download{''.join(suffixes)}"
    move = "Download the file yourself, and name the copy."
    if "@" in address.split("/")[2]:
        # The error of urllib would show the password.
        raise DataError(
            f"'{address}' has a user name, but only public files are downloaded. {move}"
        )
    with (
        library_errors(DataError, f"'{address}' cannot be downloaded", move),
        build_opener(_NoRedirects).open(address, timeout=SILENCE_SECONDS) as reply,
        path.open("wb") as file,
    ):
        _copy(reply, file)
    return path


class _NoRedirects(HTTPRedirectHandler):
    """Makes a redirect an error, because the user did not name its target."""

    def redirect_request(self, *request: Any) -> None:
        return None


def _copy(reply: HTTPResponse, file: IO[bytes]) -> None:
    ends = time.monotonic() + DOWNLOAD_SECONDS
    size = 0
    # `read` waits for the whole part. `read1` does not, so the time limit holds for slow servers.
    while part := reply.read1(1 << 16):
        size += len(part)
        if size > MAX_DOWNLOAD_BYTES:
            raise ValueError(f"it is larger than {MAX_DOWNLOAD_BYTES >> 30} GiB")
        if time.monotonic() > ends:
            raise ValueError(f"it took more than {DOWNLOAD_SECONDS:.0f} seconds")
        file.write(part)
