"""HTTP client of a vLLM server with one model.

The server is `vllm serve` of 0.20 or later in its own environment, with
VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs. The client uses:

- `reload_weights(weights_path=...)`, which reads safetensors from a folder into the running model
  (docs.vllm.ai, training/layerwise, "Mid Level reload_weights API"), over POST /collective_rpc;
- POST /v1/completions with token ids in and, by return_token_ids, out (serving/
  openai_compatible_server, "Completions API", extra parameters);
- cache_salt, which separates cached prefixes (design/prefix_caching): reloading weights does not
  clear the keys and values that the old ones computed.

Tested with vLLM 0.32.0 built for the CPU (docs/vllm.md).
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

# Else the client logs a line for every call where the root logger shows INFO.
logging.getLogger("httpx2").setLevel(logging.WARNING)

CONNECT_SECONDS = 10.0
"""Timeout for opening a connection, in seconds."""

TRANSIENT_STATUSES = (408, 429, 502, 503, 504)
"""HTTP statuses of a server that is starting or overloaded."""

MAX_MESSAGE_LENGTH = 300
"""Characters of a server's message that an error shows."""

Result = TypeVar("Result")


class _Logprobs(BaseModel):
    token_logprobs: list[float]


class Choice(BaseModel):
    """The fields of a completion's choice that are read."""

    token_ids: list[int]
    """The response, its stop token included."""

    logprobs: _Logprobs
    """Log-probability of each token under the sampling distribution."""

    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: list[Choice] = Field(min_length=1, max_length=1)


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None


class VLLMServer:
    """Samples responses and loads weights; calls are retried while the server is unavailable."""

    def __init__(self, url: str, *, timeout: float, at_once: int) -> None:
        """Prepare a client; sends no request.

        A call may take `timeout` seconds, and is retried for as long. At most `at_once` prompts are
        sampled at a time.
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
        """Raise if the server cannot sample the responses of a run.

        `prompt` is any prompt; no prompt with its response is longer than `longest`.

        Raises:
            ModelError: the context of its model is too short.
            ConfigError: its log-probabilities are not those of the sampling distribution.
            TrainingError: it does not answer.
        """
        context = self._model.max_model_len
        if context is not None and longest > context:
            raise ModelError(
                f"The longest prompt with its response has {longest} tokens, and the server at "
                f"{self._url} takes {context}. Start it with a larger --max-model-len."
            )
        top_1 = SamplingSettings(stop_token_id=NO_STOP_TOKEN, temperature=1.0, top_k=1)
        choice = self._complete(prompt, 0, top_1, max_new_tokens=1, salt="check")
        # With top_k=1 the only token left has probability 1.
        if choice.logprobs.token_logprobs[0] < -1e-6:
            raise ConfigError(
                f"The server at {self._url} returns log-probabilities from before temperature, "
                "top_k and top_p: the importance weights of all tokens would be wrong. Start it "
                "with --logprobs-mode processed_logprobs."
            )

    def load(self, folder: Path) -> None:
        """Load weights from a folder of safetensors into the server; waits until it has.

        Raises:
            TrainingError: the server refuses them, or does not answer.
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
        max_new_tokens: int,
        salt: str,
    ) -> list[Choice]:
        """Sample one response to each prompt with its own seed.

        Each prompt is a request of its own, since the prompts of one request share a seed. Only
        prompts of the same `salt` share cached prefixes.

        Raises:
            TrainingError: the server refuses a prompt, or does not answer.
        """

        def request(prompt: Tokens, seed: int) -> Choice:
            return self._complete(prompt, seed, settings, max_new_tokens=max_new_tokens, salt=salt)

        # The first failure cancels the requests that have not begun.
        with ThreadPoolExecutor(self._at_once) as pool:
            return list(pool.map(request, prompts, seeds))

    def _complete(
        self,
        prompt: Tokens,
        seed: int,
        settings: SamplingSettings,
        *,
        max_new_tokens: int,
        salt: str,
    ) -> Choice:
        stop = settings.stop_token_id
        # Defaults that the server would take from the model's generation_config.
        vllm_parameters = {
            "top_k": settings.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": True,
            "stop_token_ids": [] if stop == NO_STOP_TOKEN else [stop],
            "return_token_ids": True,
            "cache_salt": salt,
        }
        body = self._call(
            "answer a prompt",
            lambda: self._client.completions.with_raw_response.create(
                model=self._model.id,
                prompt=prompt,
                seed=seed,
                max_tokens=max_new_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                logprobs=0,  # of the sampled token only
                extra_body=vllm_parameters,
            ),
        ).text
        try:
            return _Completion.model_validate_json(body).choices[0]
        except ValidationError as error:
            raise TrainingError(
                f"The server at {self._url} answers without token ids or log-probabilities: "
                f"{_short(body)}. Is it vLLM 0.20 or later?"
            ) from error

    def _call(self, action: str, request: Callable[[], Result]) -> Result:
        retrying = Retrying(
            retry=retry_if_exception(_is_transient),
            stop=stop_after_delay(self._timeout),
            wait=wait_exponential(multiplier=0.1, max=10),
            reraise=True,
        )
        try:
            return retrying(request)
        except openai.APIConnectionError as error:
            raise TrainingError(
                f"The vLLM server at {self._url} cannot be reached to {action}, for "
                f"vllm_server_timeout={self._timeout:g} seconds: {error.__cause__ or error}. "
                "Only this update is lost: start the server, and resume the run."
            ) from None
        except openai.APIStatusError as error:
            raise TrainingError(
                f"The vLLM server at {self._url} did not {action}: status "
                f"{error.status_code}: {_short(error.response.text)}. "
                f"{_NEXT_MOVES.get(error.status_code, _ANOTHER_MODEL)}"
            ) from None


_NEXT_MOVES = {
    401: "Set VLLM_API_KEY to the server's key.",
    404: "Start it with VLLM_SERVER_DEV_MODE=1, and check vllm_server_base_url.",
}
_ANOTHER_MODEL = (
    "See its log, and restart it with the policy's model: a server that refused weights may have "
    "loaded some of them."
)


def _is_transient(error: BaseException) -> bool:
    status: Any = getattr(error, "status_code", None)
    return isinstance(error, openai.APIConnectionError) or status in TRANSIENT_STATUSES


def _short(message: str) -> str:
    return " ".join(message.split())[:MAX_MESSAGE_LENGTH] or "no message"
