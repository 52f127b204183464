"""HTTP client of a vLLM server with one model.

The server is `vllm serve`, version 0.20 or later, in its own Python environment. It is started with
VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs. The client uses these features, which
are documented on docs.vllm.ai:

- POST /collective_rpc with `reload_weights(weights_path=...)` makes the running model read
  safetensors from a folder (training/layerwise, "Mid Level reload_weights API").
- POST /v1/completions takes prompts as token ids. With return_token_ids the responses are token
  ids, too (serving/openai_compatible_server, "Completions API", extra parameters).
- cache_salt separates cached prefixes (design/prefix_caching). Each version of the weights needs a
  new salt, because reload_weights does not clear keys and values of the old weights.

Tested with vLLM 0.32.0 built for the CPU (docs/vllm.md).
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
from pydantic import BaseModel, Field, ValidationError
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from ppo_core.data.prompts import Tokens
from ppo_core.errors import ConfigError, ModelError, TrainingError
from ppo_core.errors.redaction import redact
from ppo_core.io.http_client import make_client
from ppo_core.rollout.token_sampling import NO_STOP_TOKEN, SamplingSettings

CONNECT_SECONDS = 10.0
"""Timeout for opening a connection, in seconds."""

TRANSIENT_STATUSES = (408, 429, 502, 503, 504)
"""HTTP statuses of a server that is starting or overloaded; the request is retried."""

MAX_MESSAGE_LENGTH = 300
"""Largest number of characters of a server's message that our error messages contain."""

Result = TypeVar("Result")


class _Logprobs(BaseModel):
    token_logprobs: list[float]


class Choice(BaseModel):
    """The fields of a sampled response that the client reads."""

    token_ids: list[int]
    """Token ids of the response, the stop token included."""

    logprobs: _Logprobs
    """Log-probabilities of the tokens under the sampling distribution."""

    finish_reason: str | None = None


class _Completion(BaseModel):
    choices: list[Choice] = Field(min_length=1, max_length=1)


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None


class VLLMServer:
    """Client of a vLLM server; requests are retried while the server is unavailable."""

    def __init__(self, url: str, *, timeout: float, at_once: int) -> None:
        """Create the client, without a request to the server.

        `timeout` limits the seconds of each attempt, and the seconds during which a request is
        retried. At most `at_once` prompts are sampled at a time.
        """
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._at_once = at_once
        self._client = openai.OpenAI(
            api_key=os.environ.get("VLLM_API_KEY", "").strip() or "none",
            base_url=f"{self._url}/v1",
            max_retries=0,
            timeout=openai.Timeout(timeout, connect=CONNECT_SECONDS),
            http_client=make_client(TrainingError, seconds=timeout),
        )

    @cached_property
    def _model(self) -> _Model:
        models = self._call("list its models", self._client.models.list).data
        if not models:
            raise ConfigError(f"The server at {self._url} serves no model. Start it with a model.")
        return _Model.model_validate(models[0].model_dump())

    def check(self, prompt: Tokens, longest: int) -> None:
        """Raise if the server cannot sample the responses of a run.

        `prompt` is any prompt of the run, and `longest` the largest possible number of tokens of a
        prompt with its response.

        Raises:
            ModelError: the context of the server's model is shorter than `longest`.
            ConfigError: the server serves no model, or returns log-probabilities that ignore
                temperature, top_k and top_p.
            TrainingError: the server cannot be reached, or refuses a request.
        """
        context = self._model.max_model_len
        if context is not None and longest > context:
            raise ModelError(
                f"The longest prompt with its response has {longest} tokens, but the server at "
                f"{self._url} takes at most {context}. Start the server with a larger "
                "--max-model-len."
            )
        top_1 = SamplingSettings(stop_token_id=NO_STOP_TOKEN, temperature=1.0, top_k=1)
        choice = self._complete(prompt, 0, top_1, max_new_tokens=1, salt="check")
        # With top_k=1 the sampling distribution gives its only token the probability 1.
        if choice.logprobs.token_logprobs[0] < -1e-6:
            raise ConfigError(
                f"The server at {self._url} returns log-probabilities without temperature, top_k "
                "and top_p, so all importance weights would be wrong. Start the server with "
                "--logprobs-mode processed_logprobs."
            )

    def load(self, folder: Path) -> None:
        """Make the server load weights from a folder of safetensors; wait until it has finished.

        Raises:
            TrainingError: the server refuses the weights, or cannot be reached.
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
        on_finished: Callable[[int], object],
    ) -> list[Choice]:
        """Sample one response to each prompt; `seeds` has one seed for each prompt.

        Each prompt is sent as a separate request, because a request has only one seed. Only prompts
        with the same `salt` share cached prefixes. `on_finished` is as in `VLLMSampler.sample`.

        Raises:
            TrainingError: the server refuses a prompt, cannot be reached, or answers without token
                ids or log-probabilities.
        """

        def request(prompt: Tokens, seed: int) -> Choice:
            return self._complete(prompt, seed, settings, max_new_tokens=max_new_tokens, salt=salt)

        # If a request fails, `map` cancels the requests that have not begun.
        choices = []
        with ThreadPoolExecutor(self._at_once) as pool:
            for choice in pool.map(request, prompts, seeds):
                choices.append(choice)
                on_finished(1)
        return choices

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
        # Without these parameters the server would use the model's generation_config.
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
                logprobs=0,  # only for the sampled token
                extra_body=vllm_parameters,
            ),
        ).text
        try:
            return _Completion.model_validate_json(body).choices[0]
        except ValidationError as error:
            raise TrainingError(
                f"The server at {self._url} answers without token ids or log-probabilities: "
                f"{_short(body)}. Start vLLM 0.20 or later."
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
            if isinstance(error.__cause__, httpx2.ReadTimeout):
                raise TrainingError(
                    f"The vLLM server at {self._url} did not {action} within "
                    f"vllm_server_timeout={self._timeout:g} seconds. Raise vllm_server_timeout, "
                    "or see the server's log, and resume the run."
                ) from None
            raise TrainingError(
                f"The vLLM server at {self._url} cannot be reached to {action}, after retries "
                f"for vllm_server_timeout={self._timeout:g} seconds: {error.__cause__ or error}. "
                "Start the server, and resume the run."
            ) from None
        except openai.APIStatusError as error:
            raise TrainingError(
                f"The vLLM server at {self._url} did not {action}: status "
                f"{error.status_code}: {_short(error.response.text)}. "
                f"{_next_move(error.status_code)}"
            ) from None


_NEXT_MOVES = {
    401: "Set VLLM_API_KEY to the server's key.",
    404: "Start the server with VLLM_SERVER_DEV_MODE=1, and check vllm_server_base_url.",
}
_ANOTHER_MODEL = (
    "See the server's log, and restart the server with the policy's model. A server that refused "
    "weights may have loaded some of them."
)


def _next_move(status: int) -> str:
    if 300 <= status < 400:
        return (
            "It redirects to another address, and a redirect is not followed. Set "
            "vllm_server_base_url to the address of the server itself."
        )
    return _NEXT_MOVES.get(status, _ANOTHER_MODEL)


def _is_transient(error: BaseException) -> bool:
    status: Any = getattr(error, "status_code", None)
    return isinstance(error, openai.APIConnectionError) or status in TRANSIENT_STATUSES


def _short(message: str) -> str:
    # Redact before cutting: a part of a key would not be recognized.
    return " ".join(redact(message).split())[:MAX_MESSAGE_LENGTH] or "no message"
