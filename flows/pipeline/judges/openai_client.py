"""Make one call to an OpenAI-compatible server, and classify the errors of failed calls."""

import asyncio
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import openai
from pydantic import BaseModel, Field, ValidationError

from pipeline.judges.chat_model import Question
from pipeline.judges.judge_names import read_access
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.errors import JudgeError
from ppo_core.errors.redaction import mask_secrets, redact
from ppo_core.io.http_client import make_async_client

CONNECT_SECONDS = 10.0
"""Timeout for opening a connection, in seconds; short, so that a wrong address is found soon."""

QUESTION_STATUSES = (400, 413, 422)
"""HTTP statuses with which servers reject a question, for example one that is too long. Servers
also send them for a wrong model or setting."""

MAX_MESSAGE_CHARACTERS = 300
"""Maximum length of a server's message within an error."""


class CallError(Exception):
    """A call failed, but may succeed if it is repeated."""

    def __init__(self, words: str, retry_after: float | None = None) -> None:
        """Take the message, and the seconds to wait that the server asks for; None if unknown."""
        super().__init__(words)
        self.retry_after = retry_after


class RefusedError(JudgeError):
    """The server rejects a call, because of its question or because of the settings."""


@dataclass(frozen=True)
class Completion:
    """The fields of a chat completion that a judge reads."""

    text: str | None
    """Text of the reply; None if there is none, for example if reasoning used all tokens."""

    finish_reason: str | None
    """Reason why the model stopped, as the server names it."""

    tokens: int | None
    """Number of tokens of question and reply; None if the server does not report it."""


class OpenAIClient:
    """Calls one model through the chat completions API; see `read_access` for address and key."""

    def __init__(self, model: str, config: JudgingConfig) -> None:
        """Read the address and the key; make no call.

        Raises:
            ConfigError: the address is invalid, or the key is missing or cannot be sent.
        """
        access = read_access(config.base_url)
        self.url, self._key = access.url, access.key
        self._model = model
        self._deadline = config.deadline_seconds
        self._greedy = config.sampling == "greedy"
        # OpenAI renamed the parameter, but some other servers know only the old name.
        limit = "max_completion_tokens" if access.is_openai else "max_tokens"
        self._request: dict[str, Any] = {"model": model, limit: config.max_reply_tokens}
        if self._greedy:
            self._request["temperature"] = 0.0

    def client(self) -> openai.AsyncOpenAI:
        """Return a client without retries, for one event loop; the caller closes it."""
        return openai.AsyncOpenAI(
            api_key=self._key or "none",
            base_url=self.url,
            max_retries=0,
            timeout=openai.Timeout(None, connect=CONNECT_SECONDS),
            http_client=make_async_client(JudgeError),
        )

    async def complete(self, client: openai.AsyncOpenAI, question: Question) -> Completion:
        """Make one call.

        Raises:
            CallError: the failure may be temporary: status 408, 409, 429 or 5xx, a lost
                connection, the deadline, or a body that is not a chat completion.
            RefusedError: the server rejects this call, but may accept other questions.
            JudgeError: the server rejects or redirects every call, or its reply is too large.
        """
        request = {**self._request, "messages": question}
        try:
            # The client's own timeout restarts whenever bytes arrive, so it is not a deadline.
            async with asyncio.timeout(self._deadline):
                response = await client.chat.completions.with_raw_response.create(**request)
        except TimeoutError:
            limit = f"judging.deadline_seconds={self._deadline:g}"
            raise CallError(f"no complete reply within {limit}") from None
        except openai.APIConnectionError as error:
            raise CallError(_clean(f"{error.message} {error.__cause__ or ''}")) from None
        except openai.APIStatusError as error:
            raise self._as_judge_error(error) from None
        try:
            return _read(response.text)
        except ValidationError:
            words = _clean(response.text) or "nothing"
            raise CallError(f"the reply is not a chat completion: {words}") from None

    def _as_judge_error(self, error: openai.APIStatusError) -> CallError | JudgeError:
        status = error.status_code
        words = f"status {status}: {_clean(_message(error)) or 'no message'}"
        if status in (408, 409, 429) or status >= 500:
            return CallError(words, _retry_after(error.response.headers))
        refused = RefusedError if status in QUESTION_STATUSES else JudgeError
        return refused(
            f"{self.url} rejects the call of openai:{self._model} with {words}\n"
            f"Replies so far are kept. {self._next_move(status)}"
        )

    def _next_move(self, status: int) -> str:
        if status in (401, 403):
            return "Set OPENAI_API_KEY to a key that may use this model, and run again."
        if 300 <= status < 400:
            return (
                "The server redirects to another address, and a redirect is not followed. Set "
                "judging.base_url to the address of the server itself."
            )
        if status == 404:
            return (
                f"Check judging.base_url (which ends in /v1) and the model's name, {self._model!r}."
            )
        checks = f"Check the model's name, {self._model!r}, and its maximum context length."
        if self._greedy:
            return f'{checks} If it accepts no temperature, set judging.sampling="default".'
        return checks


def _clean(words: str) -> str:
    """Redact and shorten a server's message: some servers repeat the key in messages."""
    # Redact before shortening: part of a key would not be recognized.
    return " ".join(redact(words).split())[:MAX_MESSAGE_CHARACTERS]


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
    """Parse only the fields that a judge needs, because servers differ in the other fields."""
    read = _Body.model_validate_json(body)
    choice = read.choices[0]
    tokens = read.usage.total_tokens if read.usage else None
    # A server may repeat the key in its reply, which is cached and shown in reports.
    text = mask_secrets(choice.message.content or "")
    # Some servers send a blank text if the model has used all tokens to reason.
    return Completion(text if text.strip() else None, choice.finish_reason, tokens)


def _message(error: openai.APIStatusError) -> str:
    """Return the server's message, or the body if it is not in OpenAI's format."""
    message = error.body.get("message") if isinstance(error.body, dict) else None
    return message if isinstance(message, str) else error.response.text


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the header Retry-After asks to wait (RFC 9110, 10.2.3).

    The result is negative for a date in the past, and None without a valid header.
    """
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return parsedate_to_datetime(value).timestamp() - time.time()
    except ValueError:
        return None
