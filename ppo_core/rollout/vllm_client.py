"""One model behind a vLLM server: what it is asked over HTTP, and what a failed call means.

The server is `vllm serve` of 0.20 or later in an environment of its own, with
VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs. What is used of it:

- `reload_weights(weights_path=...)`, which reads safetensors from a folder into the running model
  (docs.vllm.ai, training/layerwise, "Mid Level reload_weights API"), over POST /collective_rpc;
- POST /v1/completions with token ids in and, by return_token_ids, out (serving/
  openai_compatible_server, "Completions API", extra parameters);
- cache_salt, a name for which prefixes are cached apart (design/prefix_caching): reloading leaves
  the cached keys and values of the old weights where they are.

Tried with vLLM 0.32.0 built for the CPU (docs/vllm.md).
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import openai
from pydantic import BaseModel, Field, ValidationError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from ppo_core.data.prompts import Tokens
from ppo_core.errors import ConfigError, ModelError, TrainingError
from ppo_core.rollout.sampler import NO_STOP_TOKEN, SamplingSettings

# The client would write a line for every call where the root logger shows INFO.
logging.getLogger("httpx2").setLevel(logging.WARNING)

CONNECT_SECONDS = 10.0
"""Seconds that a connection may take to open."""

PASSING = (408, 429, 502, 503, 504)
"""What a server says that is starting, or has too much to do."""

MOST_OF_A_MESSAGE = 300
"""Characters of a server's words that an error shows."""

Result = TypeVar("Result")


class _Logprobs(BaseModel):
    token_logprobs: list[float]


class Answer(BaseModel):
    """A choice of a completion, as far as it is read."""

    token_ids: list[int]
    """The response, its stop token included."""

    logprobs: _Logprobs
    """Log-probability of each under the distribution that it was drawn from."""

    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: list[Answer] = Field(min_length=1, max_length=1)


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None


class VLLMServer:
    """Samples responses and loads weights; a call waits for a server that is away."""

    def __init__(self, url: str, *, timeout: float, at_once: int) -> None:
        """Take the address; nothing is asked.

        A call may take `timeout` seconds, and be repeated for as long. `at_once` prompts are
        under way together.
        """
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._at_once = at_once
        self._client = openai.OpenAI(
            api_key=os.environ.get("VLLM_API_KEY") or "none",
            base_url=f"{self._url}/v1",
            max_retries=0,
            timeout=openai.Timeout(timeout, connect=CONNECT_SECONDS),
        )

    @cached_property
    def _model(self) -> _Model:
        models = self._call("list its models", self._client.models.list).data
        if not models:
            raise ConfigError(f"The server at {self._url} serves no model. Start it with one.")
        return _Model.model_validate(models[0].model_dump())

    def check(self, prompt: Tokens, longest: int) -> None:
        """Refuse a server that could not answer, or whose log-probabilities are others.

        `prompt` is any, and no prompt with its response is longer than `longest`.

        Raises:
            ModelError: its model's context is too short.
            ConfigError: its log-probabilities are not those of the distribution it draws from.
            TrainingError: it does not answer.
        """
        context = self._model.max_model_len
        if context is not None and longest > context:
            raise ModelError(
                f"The longest prompt with its response has {longest} tokens, and the server at "
                f"{self._url} takes {context}. Start it with a larger --max-model-len."
            )
        likeliest = SamplingSettings(stop_token_id=NO_STOP_TOKEN, temperature=1.0, top_k=1)
        answer = self._complete(prompt, 0, likeliest, most=1, salt="check")
        # Of one token alone the probability is 1, whatever the model.
        if answer.logprobs.token_logprobs[0] < -1e-6:
            raise ConfigError(
                f"The server at {self._url} gives log-probabilities from before temperature, top_k "
                "and top_p: the weights of all tokens would be wrong. Start it with "
                "--logprobs-mode processed_logprobs."
            )

    def load(self, folder: Path) -> None:
        """Have it read its weights from a folder of safetensors; returns when it has.

        Raises:
            TrainingError: it refuses them, or does not answer.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._call(
            "load the policy's weights",
            lambda: self._client.post(f"{self._url}/collective_rpc", cast_to=object, body=body),
        )

    def complete(
        self,
        prompts: Sequence[Tokens],
        seeds: Sequence[int],
        settings: SamplingSettings,
        *,
        most: int,
        salt: str,
    ) -> list[Answer]:
        """One response to each prompt, of `most` tokens at most, drawn with its own seed.

        Each prompt is a call of its own, since those of one call would share their seed. Prompts
        share cached prefixes with those of the same `salt` alone.

        Raises:
            TrainingError: the server refuses a prompt, or does not answer.
        """

        def ask(prompt: Tokens, seed: int) -> Answer:
            return self._complete(prompt, seed, settings, most=most, salt=salt)

        # The first failure cancels what has not begun.
        with ThreadPoolExecutor(self._at_once) as pool:
            return list(pool.map(ask, prompts, seeds))

    def _complete(
        self, prompt: Tokens, seed: int, settings: SamplingSettings, *, most: int, salt: str
    ) -> Answer:
        stop = settings.stop_token_id
        # All that the server would otherwise take from the model's generation_config.
        beyond_openai = {
            "top_k": settings.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "stop_token_ids": [] if stop == NO_STOP_TOKEN else [stop],
            "return_token_ids": True,
            "cache_salt": salt,
        }
        reply = self._call(
            "answer a prompt",
            lambda: self._client.completions.with_raw_response.create(
                model=self._model.id,
                prompt=prompt,
                seed=seed,
                max_tokens=most,
                temperature=settings.temperature,
                top_p=settings.top_p,
                logprobs=0,  # of the drawn token, and none beside it
                extra_body=beyond_openai,
            ),
        ).text
        try:
            return _Completion.model_validate_json(reply).choices[0]
        except ValidationError as error:
            raise TrainingError(
                f"The server at {self._url} answers without token ids or log-probabilities: "
                f"{_short(reply)}. Is it vLLM 0.20 or later?"
            ) from error

    def _call(self, what: str, request: Callable[[], Result]) -> Result:
        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_delay(self._timeout),
            wait=wait_exponential(multiplier=0.1, max=10),
            reraise=True,
        )
        try:
            return retrying(request)
        except openai.APIConnectionError as error:
            raise TrainingError(
                f"The vLLM server at {self._url} cannot be reached to {what}, for "
                f"vllm_server_timeout={self._timeout:g} seconds: {error.__cause__ or error}. "
                "This update is lost and nothing else: start the server, and resume the run."
            ) from None
        except openai.APIStatusError as error:
            raise TrainingError(
                f"The vLLM server at {self._url} does not {what}, with status "
                f"{error.status_code}: {_short(error.response.text)}. "
                f"{_NEXT_MOVES.get(error.status_code, _ANOTHER_MODEL)}"
            ) from None


_NEXT_MOVES = {
    401: "Set VLLM_API_KEY to the server's key.",
    404: "Start it with VLLM_SERVER_DEV_MODE=1, and check vllm_server_base_url.",
}
_ANOTHER_MODEL = (
    "See its log, and start it anew with the policy's model: one that refused weights has a part "
    "of them."
)


def _may_pass(error: BaseException) -> bool:
    """Whether another attempt can succeed."""
    status: Any = getattr(error, "status_code", None)
    return isinstance(error, openai.APIConnectionError) or status in PASSING


def _short(words: str) -> str:
    return " ".join(words.split())[:MOST_OF_A_MESSAGE] or "no message"
