"""Serve the champion of a registered model, and switch when another version is promoted.

    python docs/champion_service.py rlhf-policy --port 8000
    curl localhost:8000/generate -d '{"prompt": "Hello"}' -H 'content-type: application/json'
    curl localhost:8000/health

With --record, each answer is an MLflow trace with an id in the reply; users can judge the answer:

    curl localhost:8000/feedback -d '{"answer": "tr-...", "user": "ann", "liked": true}' \
        -H 'content-type: application/json'

`python flows/feedback.py collect rlhf-policy` makes training data of the feedback.

A new champion is fetched, verified and loaded, and must answer one question before it takes over.
Until then, and if one of these steps fails, the old champion serves. A request that has started is
answered by the same model to its end.
"""

import argparse
import asyncio
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.background import BackgroundTask
from transformers.generation.streamers import BaseStreamer

from flows.champion import Champion, champion_version, load_champion
from flows.serving.answer_traces import begin_answer, record_opinion, record_to
from ppo_core.data.encode_prompts import encode_prompt, response_text
from ppo_core.data.prompts import check_prompt_sizes
from ppo_core.data.rows.dialogues import in_format_of
from ppo_core.data.rows.row_error import RowError
from ppo_core.errors import DataError, ModelError

log = logging.getLogger("champion_service")
generations = ThreadPoolExecutor(max_workers=1)  # one generation at a time; other requests wait
opinions = ThreadPoolExecutor(max_workers=4)  # requests to MLflow
RETRY_SECONDS = 300  # before a refused version is tried again
LEAST_TEMPERATURE = 0.01  # with much lower ones, the logits overflow: probabilities are NaN


class Question(BaseModel):
    """A prompt or messages, and the generation settings; a prompt is one message of the user."""

    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    # In these two settings, None means the value with which the champion was evaluated.
    max_new_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None  # 0: greedy decoding
    stream: bool = False


class Opinion(BaseModel):
    """What a user thinks of an answer."""

    answer: str = Field(max_length=200)  # id of the answer, as in its reply
    user: str = Field(min_length=1, max_length=200)
    liked: bool | None = None
    correction: str | None = Field(None, max_length=100_000)  # a better answer


class Follower:
    """The champion that serves, and a thread that polls the alias for the next one."""

    def __init__(self, name: str, poll_seconds: float) -> None:
        """Load the champion; raise ModelError if there is none that can serve."""
        self.name, self.poll_seconds = name, poll_seconds
        self.champion = load_and_try(name, champion_version(name))
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        refused, retry_at, logged = "", 0.0, ""
        while True:
            time.sleep(self.poll_seconds)
            version = ""
            try:
                version = champion_version(self.name)
                if version == self.champion.version:
                    refused, logged = "", ""
                elif version != refused or time.monotonic() > retry_at:
                    self.champion = load_and_try(self.name, version)
                    log.info("Version %s of '%s' serves now.", version, self.name)
            except Exception as error:  # whatever fails, the old champion keeps serving
                refused, retry_at = version, time.monotonic() + RETRY_SECONDS
                if str(error) != logged:  # an hour without the registry is logged once
                    logged = str(error)
                    log.warning("Version %s keeps serving. %s", self.champion.version, logged)


def load_and_try(name: str, version: str) -> Champion:
    """Load a version; raise ModelError unless it answers once with finite logits."""
    champion = load_champion(name, version=version)
    question = Question(prompt="Hello", max_new_tokens=1)
    ids = encode(champion, question)
    generate(champion, ids, question)
    if not champion.model(ids).logits.isfinite().all():
        raise ModelError(f"Version {version} of '{name}' gives logits that are not finite.")
    return champion


def check_temperature(temperature: float | None) -> None:
    """Raise DataError for a temperature with which the model cannot sample."""
    # A Field cannot check this: FastAPI repeats a refused value, and JSON has no infinity or NaN.
    if temperature and not LEAST_TEMPERATURE <= temperature < math.inf:
        raise DataError(
            f"temperature={temperature:g} cannot be used. Give 0, which always takes the likeliest "
            f"token, or a finite number of at least {LEAST_TEMPERATURE:g}."
        )


def encode(champion: Champion, question: Question) -> torch.Tensor:
    """Return token ids (1, T), encoded as in training; raise DataError if that fails."""
    if (question.prompt is None) == (question.messages is None):
        raise DataError("Give either a prompt or messages.")
    given: Any = question.messages
    if question.prompt is not None:
        try:
            # As in training, a chat model reads a text as one message of the user.
            given = in_format_of(champion.tokenizer, question.prompt)
        except RowError as error:
            raise DataError(f"A question {error} cannot be answered.") from error
    context = getattr(champion.model.config, "max_position_embeddings", sys.maxsize)
    longest = question.max_new_tokens or champion.model.generation_config.max_new_tokens
    check_prompt_sizes([given], context=context, response_length=longest)
    ids = encode_prompt(champion.tokenizer, given)
    if not 0 < len(ids) <= context - longest:
        raise DataError(
            f"A prompt of {len(ids)} tokens and an answer of up to {longest} do not fit: the "
            f"prompt needs at least one token, and both together at most {context}."
        )
    return torch.tensor([ids], device=champion.model.device)


def generate(champion: Champion, ids: torch.Tensor, question: Question, **options: Any) -> str:
    """Return the full answer."""
    if question.temperature is not None:
        options["do_sample"] = question.temperature > 0
        options["temperature"] = question.temperature or None
    if question.max_new_tokens is not None:
        options["max_new_tokens"] = question.max_new_tokens
    mask = torch.ones_like(ids)
    tokens = champion.model.generate(ids, attention_mask=mask, **options)
    return answer_text(champion, tokens[0].tolist(), ids.shape[1])


def answer_text(champion: Champion, tokens: list[int], prompt_length: int) -> str:
    """Return the text after a prompt, decoded as in the evaluation: without the stop token."""
    prompt, answer = tokens[:prompt_length], tokens[prompt_length:]
    if answer and answer[-1] == champion.model.generation_config.eos_token_id:
        answer.pop()
    return response_text(champion.tokenizer, prompt, answer)


class Pieces(BaseStreamer):
    """The text of an answer in pieces; joined, they are what `generate` returns."""

    def __init__(self, champion: Champion, prompt_length: int) -> None:
        """Take the number of tokens of the prompt, which are the first tokens of `put`."""
        self.champion, self.prompt_length = champion, prompt_length
        self.tokens: list[int] = []
        self.sent = 0  # characters
        self.queue: SimpleQueue[str | None] = SimpleQueue()

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt or a new token."""
        self.tokens += value.flatten().tolist()
        # The last character may be incomplete: the next token may add its missing bytes.
        self._send(self._text().rstrip("\ufffd"))

    def end(self) -> None:
        """Send the rest of a complete answer."""
        self._send(self._text())

    def close(self) -> None:
        """End the iteration."""
        self.queue.put(None)

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces until `close`."""
        return iter(self.queue.get, None)

    def _text(self) -> str:
        # Decode all tokens together: a tokenizer may drop the space before the first one.
        return answer_text(self.champion, self.tokens, self.prompt_length)

    def _send(self, text: str) -> None:
        if piece := text[self.sent :]:
            self.queue.put(piece)
            self.sent = len(text)


def stream(
    champion: Champion, ids: torch.Tensor, question: Question, gone: threading.Event
) -> Iterator[str]:
    """Yield the answer in pieces during generation; stop when the client has disconnected."""
    pieces = Pieces(champion, ids.shape[1])
    stop = [lambda ids, *_, **__: torch.tensor([gone.is_set()], device=ids.device)]
    options = {"streamer": pieces, "stopping_criteria": stop}
    work = generations.submit(generate, champion, ids, question, **options)
    work.add_done_callback(lambda _: pieces.close())  # ends the loop below, also after an error
    yield from pieces
    work.result()  # an error closes the connection: a partial answer never looks complete


End = Callable[[str], None]  # records the complete text of an answer


@dataclass(frozen=True)
class Recorder:
    """Records answers as traces of MLflow; does nothing unless it is on."""

    name: str
    is_on: bool

    def begin(self, question: Question, version: str) -> tuple[dict[str, str], End]:
        """Return a header with the answer's id, and the function that records the text."""
        if not self.is_on:
            return {}, lambda text: None
        prompt = {"prompt": question.prompt, "messages": question.messages}
        inputs = {name: given for name, given in prompt.items() if given is not None}
        span = begin_answer(self.name, version, inputs)
        return {"X-Answer-Id": span.trace_id}, lambda text: span.end(outputs={"text": text})


def recorded(pieces: Iterator[str], end: End) -> Iterator[str]:
    """Yield the pieces of an answer; record the whole answer when it is complete."""
    texts = []
    for piece in pieces:
        texts.append(piece)
        yield piece
    end("".join(texts))


def make_app(follower: Follower, recorder: Recorder) -> FastAPI:
    """Return the app with the routes /generate, /health and, if answers are recorded, /feedback."""
    app = FastAPI(title=follower.name)

    @app.post("/generate")
    def answer(question: Question) -> Response:
        champion = follower.champion
        headers = {"X-Model-Version": champion.version}
        try:
            check_temperature(question.temperature)
            ids = encode(champion, question)
        except DataError as error:
            raise HTTPException(422, str(error), headers) from error
        more, end = recorder.begin(question, champion.version)
        headers |= more
        if question.stream:
            gone = threading.Event()
            return StreamingResponse(
                recorded(stream(champion, ids, question, gone), end),
                headers=headers,
                media_type="text/plain",
                background=BackgroundTask(gone.set),  # also if the client disconnects early
            )
        text = generations.submit(generate, champion, ids, question).result()
        end(text)
        reply = {"version": champion.version, "text": text}
        reply |= {"answer": answer_id} if (answer_id := headers.get("X-Answer-Id")) else {}
        return JSONResponse(reply, headers=headers)

    if recorder.is_on:

        @app.post("/feedback")
        async def judge(opinion: Opinion) -> dict[str, str]:
            given = opinion.model_dump()
            record = partial(record_opinion, follower.name, given.pop("answer"), **given)
            try:
                # Not in the threads of /generate, which must not wait for MLflow.
                await asyncio.get_running_loop().run_in_executor(opinions, record)
            except DataError as error:
                raise HTTPException(422, str(error)) from error
            except ModelError as error:
                log.warning("%s", error)
                raise HTTPException(
                    503, "Perhaps not all feedback was recorded. Send it again."
                ) from error
            return {"answer": opinion.answer}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"name": follower.name, "version": follower.champion.version}

    return app


def main() -> int:
    """Serve until stopped; return 1 if no champion can be loaded at the start."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="registered model whose alias champion is served")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--poll-seconds", type=float, default=5, help="between reads of the alias")
    parser.add_argument(
        "--record", action="store_true", help="record prompts and answers in MLflow, take feedback"
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("urllib3").setLevel(logging.ERROR)  # the follower logs a failure once
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the next poll is the retry
    try:
        follower = Follower(given.name, given.poll_seconds)
    except ModelError as error:
        print(f"champion_service: {error}", file=sys.stderr)
        return 1
    if given.record:
        record_to(given.name)
    recorder = Recorder(given.name, is_on=given.record)
    uvicorn.run(make_app(follower, recorder), host=given.host, port=given.port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
