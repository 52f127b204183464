"""The loop of PPO, nothing else."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from ppo_core.advantages import gae_advantages
from ppo_core.config import PPOConfig
from ppo_core.engine import Engine
from ppo_core.errors import ConfigError, ModelError, TrainingError
from ppo_core.kl import kl_per_token
from ppo_core.metrics import Metrics, objective_metrics, update_metrics
from ppo_core.models import ActorCritic, Critic, LanguageModel, RewardModel, context_length
from ppo_core.progress import progress
from ppo_core.prompts import PromptStream, check_prompt_lengths, encode_prompt, response_texts
from ppo_core.records import Experience, Rollout, Scores, TokenSums
from ppo_core.rewards import penalise_missing_stop, token_rewards
from ppo_core.rollout import sample_responses, stop_token
from ppo_core.scoring import score, score_texts, score_tokens
from ppo_core.tensors import standardise
from ppo_core.update import Trainee, update_policy


class PPOTrainer:
    """Trains a policy against a reward model, held near a reference by the KL divergence."""

    def __init__(
        self,
        args: PPOConfig,
        processing_class: PreTrainedTokenizerBase,
        model: PreTrainedModel,
        ref_model: PreTrainedModel,
        reward_model: RewardModel,
        train_dataset: Sequence[str],
        value_model: Critic | None = None,
        *,
        log: Callable[[Metrics], None] = lambda metrics: None,
    ) -> None:
        """Take the models; `model` and `value_model` are trained in place.

        Without a `value_model` the critic starts from the reward model if that reads the
        policy's tokens, else from the policy. `train_dataset` holds the prompts; `log` gets the
        metrics of each update, in the main process.

        Raises:
            ConfigError: the batch cannot be split over the processes.
            ModelError: policy and reference are one object, nothing is trainable, or
                `reward_model` is no RewardModel.
            DataError: a prompt leaves no room for a response.
        """
        if model is ref_model:
            raise ModelError(
                "The policy and the reference are the same object: the KL divergence would stay "
                "0. Load the reference apart."
            )
        if not isinstance(reward_model, RewardModel):
            raise ModelError(
                f"reward_model is a {type(reward_model).__name__}; make it a RewardModel, which "
                "knows its tokenizer, with ppo_core.load_reward_model(path)."
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ModelError("No parameter of the policy requires a gradient: nothing would learn.")
        self.config = args
        self.tokenizer = processing_class
        self.engine = Engine()
        _check_split(args, self.engine.num_processes)
        self.stop_token_id = stop_token(processing_class, args.stop_token_id)
        self._prompt_texts = list(train_dataset)
        self._prompts = [encode_prompt(processing_class, text) for text in self._prompt_texts]
        check_prompt_lengths(
            self._prompts,
            context=context_length(model.config),
            response_length=args.response_length,
        )
        self._log = log

        device = self.engine.device
        self._shares_tokens = reward_model.reads_tokens_of(processing_class)
        self.policy = LanguageModel(model.eval().to(device))
        self.reference = LanguageModel(ref_model.eval().to(device))
        self.reward_model = reward_model
        reward_model.model.eval().to(device)
        self.critic = (value_model or self._new_critic()).eval().to(device)
        self._trainee = _make_trainee(self.policy, self.critic, args, self.engine)

        self._stream = PromptStream(len(self._prompts), seed=args.seed)
        self._sampling = torch.Generator().manual_seed(args.seed)
        self._shuffling = torch.Generator().manual_seed(args.seed)
        self._episodes = 0
        self._seconds: dict[str, float] = {}

    def train(self) -> list[Metrics]:
        """Run all updates; returns the metrics of each.

        Raises:
            TrainingError: a score or a gradient is not finite.
        """
        history = []
        started = time.monotonic()
        with progress(self.config.total_episodes, "ppo", "episode") as bar:
            for _ in range(self.config.num_updates):
                metrics = self.step()
                metrics["eps"] = self._episodes / (time.monotonic() - started)
                history.append(metrics)
                if self.engine.is_main:
                    self._log(metrics)
                bar.set_postfix(
                    score=f"{metrics['objective/scores']:.2f}",
                    kl=f"{metrics['objective/kl']:.2f}",
                    refresh=False,
                )
                bar.update(self.config.batch_size)
        return history

    def step(self) -> Metrics:
        """One update: sample, score, learn."""
        config, learning_rate = self.config, float(self._trainee.scheduler.get_last_lr()[0])
        rows, uniforms = self._draw()
        with self._timed("sampling"):
            rollout = sample_responses(
                self.policy,
                [self._prompts[row] for row in rows],
                uniforms,
                stop_token_id=self.stop_token_id,
                temperature=config.temperature,
                batch_size=config.generation_batch_size,
            )
        with self._timed("scoring"):
            scores = score(
                rollout,
                reference=self.reference,
                critic=self.critic,
                reward=partial(self._reward, [self._prompt_texts[row] for row in rows]),
                batch_size=config.generation_batch_size,
            )
        kl = self._kl(rollout, scores)
        with self._timed("updating"):
            experience = self._experience(rollout, scores, kl)
            sums = update_policy(self._trainee, experience, config, self.engine, self._shuffling)
        self._episodes += config.batch_size
        return self._summarize(rollout, scores, kl, sums) | {
            "lr": learning_rate,
            "episode": float(self._episodes),
        }

    def save_model(self, folder: str | Path) -> None:
        """Write policy and tokenizer as transformers reads them, weights as safetensors."""
        if self.engine.is_main:
            self.policy.model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def _new_critic(self) -> Critic:
        if self._shares_tokens and self.reward_model.token_head is not None:
            return Critic.from_reward_model(self.reward_model)
        return Critic.from_policy(self.policy.model)

    def _draw(self) -> tuple[list[int], Tensor]:
        """This process's share of the next prompts, and of the randomness to answer them.

        Both are drawn for the whole batch in every process, so that a response does not depend
        on how many processes there are.
        """
        size, share = (
            self.config.batch_size,
            slice(self.engine.rank, None, self.engine.num_processes),
        )
        rows = self._stream.next_batch(size)
        uniforms = torch.rand(size, self.config.response_length, generator=self._sampling)
        return rows[share], uniforms[share]

    def _reward(self, prompts: Sequence[str], rollout: Rollout) -> Tensor:
        """Scores (B,) less the penalty for a missing stop token.

        Raises:
            TrainingError: a score is not finite; the error shows its prompt.
        """
        batch_size = self.config.generation_batch_size
        if self._shares_tokens:
            scores = score_tokens(self.reward_model, rollout, batch_size)
        else:
            scores = score_texts(self.reward_model, self.tokenizer, prompts, rollout, batch_size)
        for b in (~scores.isfinite()).nonzero()[:, 0].tolist():
            answer = response_texts(self.tokenizer, rollout)[b]
            raise TrainingError(
                f"The reward model's score is {scores[b].item()} for the prompt {prompts[b]!r} "
                f"with the response {answer!r}. Training stopped before this update; remove the "
                "prompt or mend the reward model."
            )
        return penalise_missing_stop(scores, rollout.has_stop, self.config.missing_eos_penalty)

    def _kl(self, rollout: Rollout, scores: Scores) -> Tensor:
        """KL estimates (B, T), 0 where not counted."""
        kl = kl_per_token(rollout.logprobs, scores.ref_logprobs, self.config.kl_estimator)
        return torch.where(rollout.response_mask, kl, 0)

    def _experience(self, rollout: Rollout, scores: Scores, kl: Tensor) -> Experience:
        config, mask = self.config, rollout.response_mask
        whiten = partial(standardise, mask=mask, sum_over_processes=self.engine.sum)
        rewards = token_rewards(scores.scores, kl, mask, kl_coef=config.kl_coef)
        if config.whiten_rewards:
            rewards = whiten(rewards, keep_mean=True)
        advantages = gae_advantages(
            rewards, scores.values, gamma=config.gamma, gae_lambda=config.lam
        )
        returns = advantages + scores.values
        if config.whiten_advantages:
            advantages = whiten(advantages, keep_mean=False)
        return Experience(
            rollout=rollout, values=scores.values, advantages=advantages, returns=returns
        )

    def _summarize(self, rollout: Rollout, scores: Scores, kl: Tensor, sums: TokenSums) -> Metrics:
        objective = objective_metrics(
            rollout,
            scores,
            kl,
            kl_coef=self.config.kl_coef,
            sum_over_processes=self.engine.sum,
        )
        return (
            objective
            | update_metrics(sums.summed(self.engine.sum, self.engine.device))
            | self._seconds
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._seconds[f"time/{phase}"] = time.monotonic() - started


def _check_split(config: PPOConfig, num_processes: int) -> None:
    parts = num_processes * config.num_mini_batches
    if left := config.batch_size % parts:
        raise ConfigError(
            f"batch_size={config.batch_size} cannot be split evenly over {num_processes} processes "
            f"and num_mini_batches={config.num_mini_batches}: {left} responses would be left over. "
            f"Choose a multiple of {parts}."
        )


def _make_trainee(
    policy: LanguageModel, critic: Critic, config: PPOConfig, engine: Engine
) -> Trainee:
    module = ActorCritic(policy, critic)
    optimizer = torch.optim.AdamW(
        _parameter_groups(module, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )
    scheduler = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=round(config.warmup_ratio * config.num_optimizer_steps),
        num_training_steps=config.num_optimizer_steps,
    )
    return Trainee(module=engine.prepare(module), optimizer=optimizer, scheduler=scheduler)


def _parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices decay; norms and biases do not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
