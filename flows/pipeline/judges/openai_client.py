"""An OpenAI-compatible server: its address, its key, one call, and what a failed call means."""

import asyncio
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import openai
from pydantic import BaseModel, Field, HttpUrl, ValidationError

from pipeline.judges.chat_model import Question
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.errors import ConfigError, JudgeError

# The client would write a line for every call where the root logger shows INFO.
logging.getLogger("httpx2").setLevel(logging.WARNING)

OPENAI_URL = "https://api.openai.com/v1"

CONNECT_SECONDS = 10.0
"""Seconds that a connection may take to open, so that a dead address is known as such soon."""

QUESTION_STATUSES = (400, 413, 422)
"""What a server may say to a question that is too long or against its rules, but also to a wrong
model or setting."""

MOST_OF_A_MESSAGE = 300
"""Characters of a server's words that an error shows."""


class CallError(Exception):
    """A call that failed, and may succeed another time."""

    def __init__(self, words: str, retry_after: float | None = None) -> None:
        """What happened, and the seconds that the server asks to wait, if it does."""
        super().__init__(words)
        self.retry_after = retry_after


class RefusedError(JudgeError):
    """The server refuses a call as it is: for its question, or for what all calls share."""


@dataclass(frozen=True)
class Completion:
    """What is read of a chat completion."""

    text: str | None
    """None where the model wrote no text, for it thought until its tokens were spent, or so."""

    finish_reason: str | None
    """Why it stopped, in the server's word."""

    tokens: int | None
    """Tokens of question and reply; None where the server does not say."""


class OpenAIClient:
    """One model behind the chat completions API.

    The address is `config.base_url`, or the environment variable OPENAI_BASE_URL, or OpenAI
    itself; the key is OPENAI_API_KEY, which servers other than OpenAI can do without.
    """

    def __init__(self, model: str, config: JudgingConfig) -> None:
        """Find the address and the key; nothing is asked.

        Raises:
            ConfigError: the address is none, or the key is missing or cannot be sent.
        """
        self.url = config.base_url or os.environ.get("OPENAI_BASE_URL", "") or OPENAI_URL
        self._key = os.environ.get("OPENAI_API_KEY", "").strip()
        self._model = model
        self._deadline = config.deadline_seconds
        self._greedy = config.sampling == "greedy"
        is_openai = _host(self.url) == _host(OPENAI_URL)
        _check_key(self._key, needed=is_openai)
        # OpenAI has given the limit another name, which not all other servers know.
        limit = "max_completion_tokens" if is_openai else "max_tokens"
        self._request: dict[str, Any] = {"model": model, limit: config.max_reply_tokens}
        if self._greedy:
            self._request["temperature"] = 0.0

    def client(self) -> openai.AsyncOpenAI:
        """A client that repeats nothing by itself, for one event loop; close it."""
        return openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=self.url,
            max_retries=0,
            timeout=openai.Timeout(None, connect=CONNECT_SECONDS),
        )

    async def complete(self, client: openai.AsyncOpenAI, question: Question) -> Completion:
        """Make one call.

        Raises:
            CallError: it failed in a way that may pass: a status of 408, 409, 429 or 5xx, a
                connection, the deadline, or a body that is no chat completion.
            RefusedError: the server refuses it, and perhaps only it.
            JudgeError: the server refuses it, and would refuse any other.
        """
        request = {**self._request, "messages": question}
        try:
            # A client's own timeout is one of silence, which a slow drip never reaches.
            async with asyncio.timeout(self._deadline):
                response = await client.chat.completions.with_raw_response.create(**request)
        except TimeoutError:
            limit = f"judging.deadline_seconds={self._deadline:g}"
            raise CallError(f"no whole reply within {limit}") from None
        except openai.APIConnectionError as error:
            raise CallError(self._clean(f"{error.message} {error.__cause__ or ''}")) from None
        except openai.APIStatusError as error:
            raise self._meaning(error) from None
        try:
            return _read(response.text)
        except ValidationError:
            words = self._clean(response.text) or "nothing"
            raise CallError(f"the reply is no chat completion, but {words}") from None

    def _meaning(self, error: openai.APIStatusError) -> CallError | JudgeError:
        status = error.status_code
        words = f"status {status}: {self._clean(_message(error)) or 'no message'}"
        if status in (408, 409, 429) or status >= 500:
            return CallError(words, _retry_after(error.response.headers))
        refused = RefusedError if status in QUESTION_STATUSES else JudgeError
        return refused(
            f"{self.url} refuses the judge openai:{self._model} with {words}\n"
            f"Replies so far are kept. {self._next_move(status)}"
        )

    def _next_move(self, status: int) -> str:
        if status in (401, 403):
            return "Set OPENAI_API_KEY to a key that may use this model, and run again."
        if status == 404:
            return f"Check judging.base_url (it ends in /v1) and the model's name, {self._model!r}."
        others = f"Check the model's name, {self._model!r}, and how long a text it can read."
        if self._greedy:
            return f'{others} Set judging.sampling="default" if it takes no temperature.'
        return others

    def _clean(self, words: str) -> str:
        """A server's words, short, and without the key, which some servers repeat."""
        hidden = words.replace(self._key, "***") if self._key else words
        return " ".join(hidden.split())[:MOST_OF_A_MESSAGE]


def _host(url: str) -> str | None:
    try:
        address = HttpUrl(url)
    except ValidationError as error:
        raise ConfigError(
            f"judging.base_url={url!r} is no address (OPENAI_BASE_URL where the setting is empty). "
            "Write it as http://HOST:PORT/v1."
        ) from error
    if address.username or address.password or address.query:
        raise ConfigError(
            f"The address of the judge at {address.host} holds a user, a password or a query, "
            "which would stand in every message. Give the key as OPENAI_API_KEY instead."
        )
    return address.host


def _check_key(key: str, *, needed: bool) -> None:
    if needed and not key:
        raise ConfigError(
            f"{OPENAI_URL} answers nobody without a key. Set the environment variable "
            "OPENAI_API_KEY, or judging.base_url to a server that needs none."
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "OPENAI_API_KEY holds characters that a header cannot carry. Set it again, on one line."
        )


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _Usage(BaseModel):
    total_tokens: int | None = None


class _Body(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage | None = None


def _read(body: str) -> Completion:
    """The parts of a body that are used; servers differ in the rest."""
    read = _Body.model_validate_json(body)
    choice = read.choices[0]
    tokens = read.usage.total_tokens if read.usage else None
    return Completion(choice.message.content, choice.finish_reason, tokens)


def _message(error: openai.APIStatusError) -> str:
    """The server's message, or the whole body where it is not in OpenAI's form."""
    message = error.body.get("message") if isinstance(error.body, dict) else None
    return message if isinstance(message, str) else error.response.text


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the header Retry-After asks to wait (RFC 9110, 10.2.3); None without one.

    Below 0 for a date that is past.
    """
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return parsedate_to_datetime(value).timestamp() - time.time()
    except ValueError:
        return None
