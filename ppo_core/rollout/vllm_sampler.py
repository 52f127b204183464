"""Prompts in, responses out, sampled by a vLLM server that has the policy's weights."""

import shutil
from collections.abc import Iterator, Sequence
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
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.batching import pad_rows
from ppo_core.data.prompts import Tokens
from ppo_core.data.types import Rollout
from ppo_core.distributed.engine import Engine
from ppo_core.distributed.saving import gather_weights, save_plain
from ppo_core.errors import TrainingError
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.sampler import SamplingSettings
from ppo_core.rollout.vllm_client import Answer, VLLMServer

if TYPE_CHECKING:
    from peft import PeftModel


class VLLMSampler:
    """Has a server sample what `sample_responses` would; all processes call together.

    What goes wrong in one process is raised in all of them.
    """

    def __init__(
        self,
        config: PPOConfig,
        policy: LanguageModel,
        adapted: "PeftModel | None",
        engine: Engine,
        prompts: Sequence[Tokens],
    ) -> None:
        """Find the server, and refuse one that cannot do it for all of these prompts.

        `adapted` is the PeftModel that the policy's weights are in, if it is one: the server gets
        them merged.

        Raises:
            ConfigError: the server's log-probabilities are not those of what it draws from.
            ModelError: its context is too short.
            TrainingError: it does not answer.
        """
        self._config = config
        self._policy = policy
        self._adapted = adapted
        self._engine = engine
        self._peers = engine.peers
        self._server = VLLMServer(
            config.vllm_server_base_url,
            timeout=config.vllm_server_timeout,
            at_once=config.local_rollout_forward_batch_size,
        )
        longest = max(map(len, prompts)) + config.response_length
        self._peers.together(partial(self._server.check, prompts[0], longest))

    def synchronise(self) -> str:
        """Give the server the policy's weights; returns the name of this version of them.

        The main process writes them, whole, as safetensors, and the others wait.

        Raises:
            TrainingError: they cannot be written, or the server does not load them.
            ModelError: they are an adapter's on a quantized base.
        """
        weights = gather_weights(self._engine, self._policy.model, self._adapted)
        version: str = self._peers.together(partial(self._publish, weights))[0]
        return version

    def _publish(self, weights: dict[str, Tensor] | None) -> str:
        # A name that no other run has had: the server and a network's files remember old ones.
        name = f"weights-{uuid4().hex}"
        if not self._engine.is_main:
            return name
        folder = Path(str(self._config.vllm_weights_dir)).resolve() / name
        try:
            with _no_progress_bar():
                save_plain(self._policy.model, self._adapted, folder, weights)
            self._server.load(folder)
        except OSError as error:
            raise TrainingError(
                f"The policy's weights cannot be written for the vLLM server: {error}. Make room "
                f"in vllm_weights_dir={self._config.vllm_weights_dir!r}, or set another folder."
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
    ) -> Rollout:
        """One response to each of this process's prompts, under weights of this version.

        uniforms is (B, T) as in `sample_responses`; a row's seed follows from it, and so does its
        response as far as the server repeats itself. Both log-probabilities of the rollout are
        the server's, those of the distribution that was drawn from: the trainer is to score the
        tokens itself.

        Raises:
            TrainingError: the server does not answer, or not as it was asked.
        """
        answers: list[Answer] = []

        def ask() -> None:
            answers.extend(
                self._server.complete(
                    prompts,
                    request_seeds(uniforms),
                    settings,
                    most=uniforms.shape[1],
                    salt=version,
                )
            )
            for answer in answers:
                self._check(answer, settings, most=uniforms.shape[1])

        self._peers.together(ask)
        return _as_rollout(prompts, answers, uniforms.shape[1], settings, self._policy.device)

    def _check(self, answer: Answer, settings: SamplingSettings, *, most: int) -> None:
        ids, stop = answer.token_ids, settings.stop_token_id
        vocabulary = self._policy.model.config.get_text_config().vocab_size
        wrong = None
        if len(ids) > most:
            wrong = f"{len(ids)} tokens where {most} were asked for"
        elif len(ids) < most and stop not in ids[-1:]:
            wrong = f"{len(ids)} of {most} tokens and no stop token ({answer.finish_reason})"
        elif stop in ids[:-1]:
            wrong = f"tokens behind the stop token {stop}"
        elif len(answer.logprobs.token_logprobs) != len(ids):
            wrong = f"{len(answer.logprobs.token_logprobs)} log-probabilities of {len(ids)} tokens"
        elif max(ids) >= vocabulary:
            wrong = f"the token {max(ids)}, and the policy has {vocabulary}"
        if wrong is not None:
            raise TrainingError(
                f"The vLLM server at {self._config.vllm_server_base_url} answers with {wrong}: "
                "nothing can be learned from that. Start it with the policy's model, and resume "
                "the run."
            )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Inside, transformers shows none: it would have one for each update."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def request_seeds(uniforms: Tensor) -> list[int]:
    """A seed for each row of randomness (B, T), which it follows from alone."""
    return [
        int.from_bytes(blake2b(row.numpy().tobytes(), digest_size=7).digest()) for row in uniforms
    ]


def _as_rollout(
    prompts: Sequence[Tokens],
    answers: Sequence[Answer],
    most: int,
    settings: SamplingSettings,
    device: torch.device,
) -> Rollout:
    prompt_ids, prompt_lengths = pad_rows(prompts)
    ids = torch.zeros(len(answers), most, dtype=torch.long)
    logprobs = torch.zeros(len(answers), most)
    for row, answer in enumerate(answers):
        ids[row, : len(answer.token_ids)] = torch.tensor(answer.token_ids)
        logprobs[row, : len(answer.token_ids)] = torch.tensor(answer.logprobs.token_logprobs)
    lengths = torch.tensor([len(answer.token_ids) for answer in answers])
    last = ids.gather(1, lengths[:, None] - 1)[:, 0]
    return Rollout(
        prompt_ids=prompt_ids.to(device),
        prompt_lengths=prompt_lengths.to(device),
        response_ids=ids.to(device),
        response_lengths=lengths.to(device),
        response_mask=length_mask(lengths, most).to(device),
        has_stop=(last == settings.stop_token_id).to(device),
        logprobs=logprobs.to(device),
        behaviour_logprobs=logprobs.to(device),
        temperature=settings.temperature,
    )
