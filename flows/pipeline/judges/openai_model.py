"""A chat model behind an OpenAI-compatible server, asked concurrently and with retries."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

import openai
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
)

from pipeline.judges.budget import Budget
from pipeline.judges.chat_model import Question, Reply
from pipeline.judges.openai_client import CallError, OpenAIClient, RefusedError
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.errors import JudgeError

LONGEST_RETRY_AFTER = 600.0
"""Longest wait in seconds that a server may ask for. A call that is told to wait longer (the
quota of a day is spent) is not repeated."""

DOWN_AFTER = 20
"""Consecutive unanswered questions after which the server counts as down. A short outage fails at
most the calls in flight, 8 by default; a lasting one is found after three rounds of retries."""

PROBE_RETRIES = 2
"""Retries of the call of `probe`; few, to find a dead address within seconds."""

PROBE: Question = [
    {"role": "system", "content": "You answer with one letter."},
    {"role": "user", "content": "Reply with the letter A."},
]
"""A question with the roles of a judge's questions, which not every chat template accepts."""

_back_off = wait_exponential(multiplier=1, max=60)


class OpenAIModel:
    """Asks a model behind the chat completions API: OpenAI, vLLM, TGI or `transformers serve`.

    Make one object per evaluation; judges of the same evaluation share a budget.
    """

    def __init__(self, model: str, config: JudgingConfig, budget: Budget | None = None) -> None:
        """Read the address and the key; no call is made. Without a budget, make one by `config`.

        Raises:
            ConfigError: the address is invalid, or the key is missing or cannot be sent.
        """
        self.name = f"openai:{model}"
        self.budget = budget or Budget(config.max_calls, config.max_tokens)
        self._config = config
        self._server = OpenAIClient(model, config)
        # The digest of the weights behind an address is unknown.
        self.version = (
            f"{self.name} {self._server.url} sampling={config.sampling} "
            f"max_reply_tokens={config.max_reply_tokens}"
        )
        self._random = random.Random(0)
        self._left = 0
        self._given_up_in_a_row = 0

    def ask(self, questions: Sequence[Question], keep: Callable[[int, Reply], None]) -> None:
        """Ask every question and call `keep(number, reply)` when its reply arrives.

        A question gets a reply without text if its call fails more often than `retries`, or if
        the server refuses it but accepts a small question.

        Raises:
            JudgeError: the server refuses the calls or is down, or the budget is spent. Calls in
                flight are cancelled.
        """
        self.budget.require_calls(len(questions))
        self._left = len(questions)
        asyncio.run(self._ask_all(questions, keep))

    def probe(self) -> None:
        """Make one small call to check address, key, model and settings; the budget counts it.

        Raises:
            JudgeError: they do not work.
        """
        self._left = 1
        reply = asyncio.run(self._ask_probe())
        if reply.text is None:
            raise JudgeError(
                f"The judge {self.name} at {self._server.url} does not answer: {reply.error}\n"
                "Check judging.base_url (it ends in /v1) and whether the server is up."
            )

    async def _ask_all(
        self, questions: Sequence[Question], keep: Callable[[int, Reply], None]
    ) -> None:
        slots = asyncio.Semaphore(self._config.concurrency)

        async def ask_one(number: int, question: Question) -> None:
            async with slots:
                reply = await self._answer(client, question, self._config.retries)
                keep(number, reply)
                self._take_stock(reply)

        try:
            async with self._server.client() as client, asyncio.TaskGroup() as group:
                for number, question in enumerate(questions):
                    group.create_task(ask_one(number, question))
        except ExceptionGroup as failures:
            # The first error is the cause; later ones come from the cancelled calls.
            raise failures.exceptions[0] from None

    async def _ask_probe(self) -> Reply:
        async with self._server.client() as client:
            return await self._answer(client, PROBE, min(PROBE_RETRIES, self._config.retries))

    async def _answer(self, client: openai.AsyncOpenAI, question: Question, retries: int) -> Reply:
        try:
            return await self._insist(client, question, retries)
        except CallError as error:
            return Reply(None, error=str(error))
        except RefusedError as refusal:
            # The question may be too long or against the rules: then a small one is accepted.
            with suppress(CallError):
                await self._insist(client, PROBE, retries)
            return Reply(None, error=str(refusal))

    async def _insist(self, client: openai.AsyncOpenAI, question: Question, retries: int) -> Reply:
        retrying = AsyncRetrying(
            retry=retry_if_exception(_is_worth_repeating),
            wait=self._wait,
            stop=stop_after_attempt(1 + retries),
            reraise=True,
        )
        return await retrying(self._call, client, question)

    async def _call(self, client: openai.AsyncOpenAI, question: Question) -> Reply:
        """Make one attempt and count its cost."""
        self.budget.start_call(self._left)
        completion = await self._server.complete(client, question)
        self.budget.add_tokens(completion.tokens)
        if completion.text is None:
            raise CallError(
                f"the reply has no text (finish_reason={completion.finish_reason!r}; where it is "
                "'length', raise judging.max_reply_tokens)"
            )
        return Reply(completion.text, tokens=completion.tokens or 0)

    def _wait(self, state: RetryCallState) -> float:
        """Return the seconds to the next attempt: 1, 2, 4 ... minus jitter, or as long as asked."""
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after if isinstance(error, CallError) else None
        # At least the back-off: calls that are told the same few seconds would all return at once.
        return max(asked or 0.0, _back_off(state) * self._random.uniform(0.5, 1.0))

    def _take_stock(self, reply: Reply) -> None:
        if reply.text is not None:
            self._left -= 1
            self._given_up_in_a_row = 0
            return
        self._given_up_in_a_row += 1
        if self._given_up_in_a_row >= DOWN_AFTER:
            raise JudgeError(
                f"{self._server.url} seems to be down: {DOWN_AFTER} questions in a row to the "
                f"judge {self.name} got no answer, the last one for this: {reply.error}\n"
                f"Replies so far are kept, {self._left} questions are left to ask. Run again when "
                "the server is up."
            )


def _is_worth_repeating(error: BaseException) -> bool:
    return isinstance(error, CallError) and (error.retry_after or 0.0) <= LONGEST_RETRY_AFTER
