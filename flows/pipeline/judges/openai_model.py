"""A chat model behind an OpenAI-compatible server, asked concurrently and with retries."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import openai
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
)

from pipeline.judges.chat_model import Question, Reply
from pipeline.judges.judge_budget import Budget
from pipeline.judges.openai_client import CallError, Completion, OpenAIClient, RefusedError
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.errors import JudgeError

LONGEST_RETRY_AFTER = 600.0
"""Maximum wait in seconds that a server may ask for. If it asks for more, for example because a
daily quota is spent, the call is not repeated."""

DOWN_AFTER = 20
"""Number of consecutive unanswered questions after which the server counts as down. It exceeds the
default of 8 concurrent calls, because a short outage can make all of them fail. A question that the
server rejects counts only as long as the server has not answered any question."""

FINAL_REASONS = {
    "content_filter": "The server's filter removes the answer. Use another judge.",
    "length": "Raise judging.max_reply_tokens.",
}
"""`finish_reason` of a reply without text that a repeated call would have too -> the next move."""

PROBE_RETRIES = 2
"""Maximum number of retries of `probe`; small, so that a wrong address is found within seconds."""

PROBE: Question = [
    {"role": "system", "content": "You answer with one letter."},
    {"role": "user", "content": "Reply with the letter A."},
]
"""A small question with the roles system and user, as in a judge's questions. Some chat templates
do not accept the role system."""

_back_off = wait_exponential(multiplier=1, max=60)


class OpenAIModel:
    """Asks a model behind the chat completions API: OpenAI, vLLM, TGI or `transformers serve`.

    Make a new object for each evaluation. All judges of an evaluation should share one budget.
    """

    def __init__(self, model: str, config: JudgingConfig, budget: Budget | None = None) -> None:
        """Read the address and the key; make no call. The default budget has `config`'s limits.

        Raises:
            ConfigError: the address is invalid, or the key is missing or cannot be sent.
        """
        self.name = f"openai:{model}"
        self.budget = budget or Budget(config.max_calls, config.max_tokens)
        self._config = config
        self._server = OpenAIClient(model, config)
        # The server's weights are unknown, so the version names the address instead of a digest.
        self.version = (
            f"{self.name} {self._server.url} sampling={config.sampling} "
            f"max_reply_tokens={config.max_reply_tokens}"
        )
        self._random = random.Random(0)
        self._left = 0
        self._given_up_in_a_row = 0
        self._has_answered = False

    def ask(self, questions: Sequence[Question], keep: Callable[[int, Reply], None]) -> None:
        """Ask every question and call `keep(number, reply)` when its reply arrives.

        A question gets a reply without text in three cases: all its retries failed, the server
        rejects this question but accepts a small question, or the server's reply has no text
        because of its length or a filter.

        `keep` runs in a thread of its own, so a slow `keep`, such as a write to S3, does not use up
        the deadline of another call. After an error of `keep`, no other reply is kept.

        Raises:
            JudgeError: the server rejects every call or is down, or the budget is spent. Running
                calls are canceled; replies that have arrived are still kept.
        """
        self.budget.require_calls(len(questions))
        self._left = len(questions)
        asyncio.run(self._ask_all(questions, keep))

    def probe(self) -> None:
        """Make one small call to check address, key, model and settings; it counts in the budget.

        Raises:
            JudgeError: the call fails.
        """
        self._left = 1
        reply = asyncio.run(self._ask_probe())
        if reply.text is None:
            raise JudgeError(
                f"{self.name} at {self._server.url} does not answer: {reply.error}\n"
                "Check judging.base_url (it ends in /v1) and whether the server is up."
            )

    async def _ask_all(
        self, questions: Sequence[Question], keep: Callable[[int, Reply], None]
    ) -> None:
        slots = asyncio.Semaphore(self._config.concurrency)
        loop, broken = asyncio.get_running_loop(), threading.Event()

        def keep_next(number: int, reply: Reply) -> None:
            # `broken` stays set if `keep` raises an error.
            if not broken.is_set():
                broken.set()
                keep(number, reply)
                broken.clear()

        async def ask_one(number: int, question: Question) -> None:
            async with slots:
                reply = await self._answer(client, question, self._config.retries)
                # Keep a reply that has arrived, even if another call ends the evaluation.
                await asyncio.shield(loop.run_in_executor(keeper, keep_next, number, reply))
                self._take_stock(reply)

        try:
            with ThreadPoolExecutor(max_workers=1) as keeper:
                async with self._server.client() as client, asyncio.TaskGroup() as group:
                    for number, question in enumerate(questions):
                        group.create_task(ask_one(number, question))
        except ExceptionGroup as failures:
            # The first error is the cause; canceled calls may have added later errors.
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
            # If the server rejects only this question, it accepts a small question. If it rejects
            # the small question too, the settings are wrong, and RefusedError stops the evaluation.
            with suppress(CallError):
                await self._insist(client, PROBE, retries)
                # A judge that has answered is up, however many questions it rejects.
                if self._has_answered:
                    self._given_up_in_a_row = 0
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
        self.budget.start_call(self.name, self._left)
        completion = await self._server.complete(client, question)
        self.budget.add_tokens(self.name, completion.tokens)
        if completion.text is None:
            return self._without_text(completion)
        return Reply(completion.text, tokens=completion.tokens or 0)

    def _without_text(self, completion: Completion) -> Reply:
        """Return the reply that has no text for a reason that a repeated call would have too.

        Raises:
            CallError: a repeated call may have a text.
        """
        reason = completion.finish_reason
        error = f"the reply has no text (finish_reason={reason!r})"
        if reason not in FINAL_REASONS:
            raise CallError(error)
        # A judge that has answered is up, however many of its answers have no text.
        if self._has_answered:
            self._given_up_in_a_row = 0
        return Reply(None, error=f"{error}. {FINAL_REASONS[reason]}", tokens=completion.tokens or 0)

    def _wait(self, state: RetryCallState) -> float:
        """Return the seconds to wait before the next attempt.

        This is the server's Retry-After, plus a back-off of 1, 2, 4 ... 60 seconds with jitter,
        which spreads calls that failed at the same time. A date in the past adds nothing.
        """
        error = state.outcome.exception() if state.outcome else None
        asked = error.retry_after if isinstance(error, CallError) else None
        return max(asked or 0.0, 0.0) + _back_off(state) * self._random.uniform(0.5, 1.0)

    def _take_stock(self, reply: Reply) -> None:
        if reply.text is not None:
            self._left -= 1
            self._given_up_in_a_row = 0
            self._has_answered = True
            return
        self._given_up_in_a_row += 1
        # One short outage can end all questions that are asked at the same time.
        enough = max(DOWN_AFTER, 2 * self._config.concurrency)
        if self._given_up_in_a_row >= enough:
            raise JudgeError(
                f"{self._server.url} seems to be down: {enough} questions in a row to "
                f"{self.name} got no answer. The last error: {reply.error}\n"
                f"All replies are stored, and {self._left} questions are left to ask. Run again "
                "when the server answers."
            )


def _is_worth_repeating(error: BaseException) -> bool:
    return isinstance(error, CallError) and (error.retry_after or 0.0) <= LONGEST_RETRY_AFTER
