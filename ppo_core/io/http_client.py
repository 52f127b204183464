"""HTTP clients for model servers; the clients follow no redirect and limit the size of a reply.

A redirect would send prompts and weights to an address that nobody chose.
"""

import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx2
import openai

from ppo_core.errors import PPOError

MAX_REPLY_BYTES = 32 * 2**20
"""Largest body of a reply; a response of 32,000 tokens with log-probabilities has about 4 MB."""

# Compression is not accepted, because a small compressed body may expand to gigabytes.
_OPTIONS: dict[str, Any] = {
    "follow_redirects": False,
    "headers": {"Accept-Encoding": "identity"},
}


def make_client(error: type[PPOError], *, seconds: float) -> httpx2.Client:
    """Return a client that raises `error` for a reply that is too large or takes too long.

    `seconds` limits the time from the headers to the last byte. The client's own timeout does not
    limit this time, because that timeout restarts whenever bytes arrive.
    """
    _log_no_calls()

    def limit(response: httpx2.Response) -> None:
        response.stream = _LimitedBody(response, error, seconds)

    return openai.DefaultHttpxClient(event_hooks={"response": [limit]}, **_OPTIONS)


def make_async_client(error: type[PPOError]) -> httpx2.AsyncClient:
    """Return a client that raises `error` for a too large reply; the caller must limit the time."""
    _log_no_calls()

    async def limit(response: httpx2.Response) -> None:
        response.stream = _LimitedBody(response, error, math.inf)

    return openai.DefaultAsyncHttpxClient(event_hooks={"response": [limit]}, **_OPTIONS)


def _log_no_calls() -> None:
    """Suppress the line that the library logs for every call at level INFO."""
    logging.getLogger("httpx2").setLevel(logging.WARNING)


class _LimitedBody(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """The body of a reply; reading it raises an error if a limit is exceeded."""

    def __init__(self, response: httpx2.Response, error: type[PPOError], seconds: float) -> None:
        self._body: Any = response.stream
        self._who = f"The server at {response.request.url.copy_with(path='/')}"
        self._error = error
        self._received = 0
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        encoding = response.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise error(
                f"{self._who} compresses its reply ({encoding!r:.40}), although the request does "
                "not allow it. Turn compression off in the server or its proxy."
            )

    def __iter__(self) -> Iterator[bytes]:
        for part in self._body:
            yield self._checked(part)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield self._checked(part)

    def close(self) -> None:
        self._body.close()

    async def aclose(self) -> None:
        await self._body.aclose()

    def _checked(self, part: bytes) -> bytes:
        self._received += len(part)
        if self._received > MAX_REPLY_BYTES:
            raise self._error(
                f"{self._who} sends a reply of more than {MAX_REPLY_BYTES} bytes. It is not a "
                "model server, or its settings are wrong; check the address."
            )
        if time.monotonic() > self._end:
            raise self._error(
                f"{self._who} did not finish its reply within {self._seconds:g} seconds. Raise the "
                "timeout, or check the server's log."
            )
        return part
