"""The state of a run, except its models and its optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_core.algorithm.kl_controller import LARGEST_ERROR, AdaptiveKL
from ppo_core.algorithm.running_moments import RunningMoments
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.data.prompt_stream import PromptStream
from ppo_core.data.types import Experience, Rollout, TokenSums
from ppo_core.distributed.engine import Engine
from ppo_core.errors import ConfigError
from ppo_core.io.random_state import generator_tensors, restore_generators
from ppo_core.ppo.ema import WeightAverage
from ppo_core.ppo.model_bundle import ModelBundle
from ppo_core.ppo.schedule import Schedule
from ppo_core.ppo.update import TrainState, UpdateProgress
from ppo_core.reporting.callbacks import Reporter
from ppo_core.reporting.health import HealthMonitor
from ppo_core.reporting.metrics import Metrics

GENERATORS, EXPERIENCE = "generators", "experience"
"""Names of tensor groups in a checkpoint."""

KEPT_ROLLOUT = "first_rollout_"
"""Prefix of the names of tensor groups with kept rollouts."""

ORDER = "order"
"""Name of the tensor with the order of the sequences."""
ROLLOUT = "rollout."
"""Prefix of the names of a rollout's tensors."""


@dataclass(kw_only=True)
class PendingUpdate:
    """A sampled and scored batch, and the progress of the update that uses the batch."""

    experience: Experience | None
    """Experience of the full batch, in every process; None if a score is not finite."""

    metrics: Metrics
    """Metrics of sampling and scoring."""

    progress: UpdateProgress

    def as_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the JSON-compatible state; `experience` must not be None."""
        experience = dict(vars(self.experience))
        rollout = vars(experience.pop("rollout"))
        values = experience | {f"{ROLLOUT}{name}": value for name, value in rollout.items()}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        return tensors | {ORDER: self.progress.order}, {
            "values": {name: value for name, value in values.items() if name not in tensors},
            "metrics": self.metrics,
            "steps_done": self.progress.steps_done,
            "sums": vars(self.progress.sums),
        }

    @classmethod
    def from_checkpoint(
        cls, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> "PendingUpdate":
        """Return the update whose state `as_checkpoint` returned; tensors keep their device."""
        values: dict[str, Any] = {**tensors, **state["values"]}
        order = values.pop(ORDER)
        of_rollout = {
            # Version 0.1 wrote the name "behaviour_logprobs".
            name.removeprefix(ROLLOUT).replace("behaviour", "behavior"): value
            for name, value in values.items()
            if name.startswith(ROLLOUT)
        }
        own = {name: value for name, value in values.items() if not name.startswith(ROLLOUT)}
        return cls(
            experience=Experience(rollout=Rollout(**of_rollout), **own),
            metrics=dict(state["metrics"]),
            progress=UpdateProgress(
                order=order,
                steps_done=state["steps_done"],
                sums=TokenSums(**state["sums"]),
            ),
        )


@dataclass(kw_only=True)
class RunState:
    """Counters, random generators and running statistics of a run."""

    stream: PromptStream
    health: HealthMonitor
    adaptive_kl: AdaptiveKL | None
    """Controller of kl_coef; None without `kl_target`."""

    generators: dict[str, torch.Generator]
    """Generators: "sampling" draws the tokens, "shuffling" the order of sequences in an update."""

    moments: RunningMoments = field(default_factory=RunningMoments)
    """Mean and variance of the scores, for `use_score_scaling`."""

    reward_moments: dict[str, RunningMoments] | None = None
    """Name of a reward -> mean and variance of its scores; None without `scale_each_reward`."""

    updates: int = 0
    episodes: int = 0

    pending: PendingUpdate | None = None
    """The unfinished update; None between updates."""

    first_rollouts: list[dict[str, Tensor]] | None = None
    """Tensors of the first rollouts (`kept_tensors`), saved with the critic; None if not kept."""

    critic_fit_is_over: bool = False
    """Whether the fit of the critic is done, or was left out because of the rewards."""

    has_first_table: bool = False
    """Whether the samples before the first update were shown."""

    @classmethod
    def at_start(cls, config: PPOConfig, schedule: Schedule, num_prompts: int) -> "RunState":
        """Return the state before the first update.

        Raises:
            ConfigError: kl_horizon is too short for the batch size.
        """
        return cls(
            stream=PromptStream(num_prompts, seed=config.seed, samples=config.samples_per_prompt),
            health=HealthMonitor(config),
            adaptive_kl=make_adaptive_kl(config, schedule),
            generators={
                name: torch.Generator().manual_seed(config.seed)
                for name in ("sampling", "shuffling")
            },
            reward_moments={} if config.scale_each_reward else None,
        )

    def kl_coef(self, config: PPOConfig) -> float:
        """Return the current coefficient of the KL divergence."""
        return self.adaptive_kl.kl_coef if self.adaptive_kl else config.kl_coef

    def as_checkpoint(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """Return groups of tensors by name, and the JSON-compatible state."""
        groups = {GENERATORS: generator_tensors(self.generators)}
        pending = None
        if self.pending is not None:
            groups[EXPERIENCE], pending = self.pending.as_checkpoint()
        for number, rollout in enumerate(self.first_rollouts or []):
            groups[f"{KEPT_ROLLOUT}{number}"] = rollout
        return groups, {
            "updates": self.updates,
            "episodes": self.episodes,
            "moments": self.moments.state_dict(),
            "reward_moments": self.reward_moments
            and {name: moments.state_dict() for name, moments in self.reward_moments.items()},
            "adaptive_kl": self.adaptive_kl.state_dict() if self.adaptive_kl else None,
            "health": self.health.state_dict(),
            "pending": pending,
            "critic_fit_is_over": self.critic_fit_is_over,
        }

    def restore(self, groups: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Restore the state that `as_checkpoint` returned."""
        restore_generators(self.generators, groups[GENERATORS])
        self.updates, self.episodes = state["updates"], state["episodes"]
        self.moments.load_state_dict(state["moments"])
        if self.reward_moments is not None:
            # Earlier versions, and runs without `scale_each_reward`, saved no moments.
            saved = state.get("reward_moments") or {}
            self.reward_moments = {name: RunningMoments() for name in saved}
            for name, moments in self.reward_moments.items():
                moments.load_state_dict(saved[name])
        self.health.load_state_dict(state["health"])
        if self.adaptive_kl is not None and state["adaptive_kl"] is not None:
            self.adaptive_kl.load_state_dict(state["adaptive_kl"])
        # Earlier versions fitted no critic and kept no rollouts.
        self.critic_fit_is_over = state.get("critic_fit_is_over", False)
        # A run shows the first samples before its first checkpoint.
        self.has_first_table = True
        if self.first_rollouts is not None:
            names = [name for name in groups if name.startswith(KEPT_ROLLOUT)]
            self.first_rollouts = [dict(groups[name]) for name in sorted(names)]
        self.pending = None
        drawn = self.episodes
        if state["pending"] is not None:
            self.pending = PendingUpdate.from_checkpoint(groups[EXPERIENCE], state["pending"])
            drawn += len(self.pending.progress.order[0])
        # The seed determines the order of the prompts, so draw the earlier prompts again.
        self.stream.restart()
        self.stream.next_batch(drawn)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The objects of a run that are needed to write checkpoints and to export the policy."""

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    models: ModelBundle
    engine: Engine
    train_state: TrainState
    run: RunState
    reporter: Reporter
    average: WeightAverage | None
    """Moving average of the policy's weights; None without `ema_decay`."""


def make_adaptive_kl(config: PPOConfig, schedule: Schedule) -> AdaptiveKL | None:
    """Return the controller of kl_coef; None without kl_target.

    Raises:
        ConfigError: kl_horizon is too short for the batch size.
    """
    target, size = config.kl_target, schedule.batch_size
    if target is None:
        return None
    if config.kl_horizon is None:
        episodes = schedule.total_episodes
        return AdaptiveKL.landing(config.kl_coef, target, episodes=episodes, batch=size)
    if (least := LARGEST_ERROR * size) >= config.kl_horizon:
        raise ConfigError(
            f"kl_horizon={config.kl_horizon} is too short for {size} episodes per update: one "
            "update could make the KL coefficient 0 or negative. Set kl_horizon (in the classic "
            f"loop: horizon) above {least:g}."
        )
    return AdaptiveKL(config.kl_coef, target, config.kl_horizon)
