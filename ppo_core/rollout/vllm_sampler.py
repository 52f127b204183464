"""Sample responses by a vLLM server that receives the policy's weights."""

import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from torch import Tensor
from transformers.utils import logging

from ppo_core.algorithm.masking import length_mask
from ppo_core.data.batching import pad_rows
from ppo_core.data.model_files import safetensors_as_os_errors
from ppo_core.data.prompts import Tokens
from ppo_core.data.text_config import text_config
from ppo_core.data.types import Rollout
from ppo_core.distributed.engine import Engine
from ppo_core.distributed.gather_weights import gather_weights, save_plain
from ppo_core.errors import TrainingError
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.token_sampling import SamplingSettings, ServerSettings
from ppo_core.rollout.vllm_client import Choice, VLLMServer

if TYPE_CHECKING:
    from peft import PeftModel


class VLLMSampler:
    """Sampler of responses by a vLLM server.

    All processes must call each method together. An error in one process is raised in all of them.
    """

    def __init__(
        self,
        server: ServerSettings,
        policy: LanguageModel,
        adapted: "PeftModel | None",
        engine: Engine,
        prompts: Sequence[Tokens],
        *,
        response_length: int,
    ) -> None:
        """Connect to the server, and check that it can sample responses to all prompts.

        `adapted` is the PeftModel if the policy has an adapter, otherwise None. The server gets the
        weights with the adapter merged. `response_length` is the largest number of tokens of a
        response.

        Raises:
            ConfigError: the server serves no model, or its log-probabilities do not fit the
                sampling distribution.
            ModelError: the context of the server's model is too short.
            TrainingError: the server cannot be reached, or refuses a request.
        """
        self._settings = server
        self._policy = policy
        self._adapted = adapted
        self._engine = engine
        self._peers = engine.peers
        self._server = VLLMServer(server.url, timeout=server.timeout, at_once=server.at_once)
        longest = max(map(len, prompts)) + response_length
        self._peers.together(partial(self._server.check, prompts[0], longest))
        self._folder = Path(server.weights_dir).resolve()
        # A folder with this prefix is a leftover of an earlier run: the prefix depends on host and
        # server, and a server serves one run at a time.
        place = f"{socket.gethostname()} {server.url}"
        self._prefix = f"weights-{blake2b(place.encode(), digest_size=8).hexdigest()}-"

    def synchronize(self) -> str:
        """Make the server load the policy's weights; return a name for this version of the weights.

        The main process writes the unsharded weights as safetensors, while other processes wait.

        Raises:
            TrainingError: the weights cannot be written, or the server does not load them.
        """
        weights = gather_weights(self._engine, self._policy.model, self._adapted)
        version: str = self._peers.together(partial(self._publish, weights))[0]
        return version

    def _publish(self, weights: dict[str, Tensor] | None) -> str:
        # Each version has a new name, because the server and network file systems cache by name.
        name = f"{self._prefix}{uuid4().hex}"
        if not self._engine.is_main:
            return name
        folder = self._folder / name
        try:
            # A killed run leaves its weights, often in memory (/dev/shm).
            for leftover in self._folder.glob(f"{self._prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with _no_progress_bar(), safetensors_as_os_errors():
                save_plain(self._policy.model, self._adapted, folder, weights)
            self._server.load(folder)
        except OSError as error:
            raise TrainingError(
                f"The policy's weights cannot be written for the vLLM server: {error}. Free disk "
                f"space in vllm_weights_dir={self._settings.weights_dir!r}, or set "
                "vllm_weights_dir to another folder."
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return name

    def sample(
        self,
        prompts: Sequence[Tokens],
        uniforms: Tensor,
        settings: SamplingSettings,
        version: str,
        on_finished: Callable[[int], object] = lambda count: None,
    ) -> Rollout:
        """Sample one response to each of this process's prompts.

        `version` is the return value of the last `synchronize`. `uniforms` is (B, T), as in
        `sample_responses`. The seed of a request is derived from the prompt's row of `uniforms`, so
        the response is reproducible if the server is deterministic. In the rollout, both `logprobs`
        and `behavior_logprobs` are the server's log-probabilities under the sampling distribution.
        The caller must replace `logprobs` by log-probabilities under the policy. `on_finished` is
        called with the number of responses that have finished since its last call.

        Raises:
            TrainingError: the server cannot be reached, or its response does not fit the request.
        """
        max_new_tokens = uniforms.shape[1]
        choices: list[Choice] = []

        def request() -> None:
            choices.extend(
                self._server.complete(
                    prompts,
                    request_seeds(uniforms),
                    settings,
                    max_new_tokens=max_new_tokens,
                    salt=version,
                    on_finished=on_finished,
                )
            )
            for choice in choices:
                self._check(choice, settings, max_new_tokens)

        self._peers.together(request)
        # Not the device of the weights: offloaded shards are in the machine's memory.
        return _as_rollout(prompts, choices, max_new_tokens, settings, self._engine.device)

    def _check(self, choice: Choice, settings: SamplingSettings, max_new_tokens: int) -> None:
        ids, stop = choice.token_ids, settings.stop_token_id
        vocabulary = text_config(self._policy.model.config).vocab_size
        wrong = None
        if len(ids) > max_new_tokens:
            wrong = f"{len(ids)} tokens where at most {max_new_tokens} were requested"
        elif len(ids) < max_new_tokens and stop not in ids[-1:]:
            wrong = (
                f"{len(ids)} of {max_new_tokens} tokens and no stop token ({choice.finish_reason})"
            )
        elif stop in ids[:-1]:
            wrong = f"tokens after the stop token {stop}"
        elif len(choice.logprobs.token_logprobs) != len(ids):
            wrong = f"{len(choice.logprobs.token_logprobs)} log-probabilities for {len(ids)} tokens"
        elif max(ids) >= vocabulary:
            wrong = f"token {max(ids)}, but the policy has only {vocabulary} tokens"
        if wrong is not None:
            raise TrainingError(
                f"The vLLM server at {self._settings.url} answers with {wrong}, so this "
                "response cannot be used. Start the server with the policy's model, and resume the "
                "run."
            )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the progress bar that transformers shows when it writes weights."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def request_seeds(uniforms: Tensor) -> list[int]:
    """Return one seed for each row of `uniforms` (B, T), a hash of the numbers in the row."""
    return [
        int.from_bytes(blake2b(numbers.numpy().tobytes(), digest_size=7).digest())
        for numbers in uniforms
    ]


def _as_rollout(
    prompts: Sequence[Tokens],
    choices: Sequence[Choice],
    max_new_tokens: int,
    settings: SamplingSettings,
    device: torch.device,
) -> Rollout:
    prompt_ids, prompt_lengths = pad_rows(prompts)
    ids = torch.zeros(len(choices), max_new_tokens, dtype=torch.long)
    logprobs = torch.zeros(len(choices), max_new_tokens)
    for b, choice in enumerate(choices):
        ids[b, : len(choice.token_ids)] = torch.tensor(choice.token_ids)
        logprobs[b, : len(choice.token_ids)] = torch.tensor(choice.logprobs.token_logprobs)
    lengths = torch.tensor([len(choice.token_ids) for choice in choices])
    last = ids.gather(1, lengths[:, None] - 1)[:, 0]
    return Rollout(
        prompt_ids=prompt_ids.to(device),
        prompt_lengths=prompt_lengths.to(device),
        response_ids=ids.to(device),
        response_lengths=lengths.to(device),
        response_mask=length_mask(lengths, max_new_tokens).to(device),
        has_stop=(last == settings.stop_token_id).to(device),
        logprobs=logprobs.to(device),
        behavior_logprobs=logprobs.to(device),
        temperature=settings.temperature,
    )
