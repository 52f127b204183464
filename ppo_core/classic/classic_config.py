"""Settings of the classic loop, with the names of TRL 0.11."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ppo_core.config.checks import require, require_count
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.unsupported_settings import refusing_unsupported
from ppo_core.errors import ConfigError

KL_ESTIMATORS: dict[str, Literal["k1", "k2", "abs", "full"]] = {
    "kl": "k1",
    "abs": "abs",
    "mse": "k2",
    "full": "full",
}
"""Estimator of the KL divergence for each value of kl_penalty."""

_COUNTED = "the trainer counts the processes: leave it out"
_LAUNCHED = "start the script with accelerate launch --config_file FILE, or torchrun"
_READ = "it is read from the model: leave it out"
_MEMORY = "there is no such option: leave it out, and lower mini_batch_size if memory is short"
_BEST = "compare the statistics of step() in the script, and call trainer.push_to_hub(repo_id)"
_PASS = "it is mini_batch_size x gradient_accumulation_steps: set those"

CLASSIC_INSTEAD: dict[str, tuple[tuple[object, ...], str]] = {
    "accelerator_kwargs": (({},), _LAUNCHED),
    "backward_batch_size": ((None,), _PASS),
    "compare_steps": ((1,), _BEST),
    "forward_batch_size": ((None,), "set mini_batch_size, the current name of the same setting"),
    "global_backward_batch_size": ((None,), _COUNTED),
    "global_batch_size": ((None,), _COUNTED),
    "is_encoder_decoder": ((None,), _READ),
    "is_peft_model": ((None,), _READ),
    "optimize_cuda_cache": ((None, False), _MEMORY),
    "optimize_device_cache": ((False,), _MEMORY),
    "project_kwargs": (({},), "set output_dir, and TENSORBOARD_LOGGING_DIR for TensorBoard"),
    "push_to_hub_if_best_kwargs": (({},), _BEST),
    "tracker_kwargs": (({},), "set the environment variables of the tracker that log_with names"),
    "tracker_project_name": (
        ("trl",),
        "set WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or TENSORBOARD_LOGGING_DIR",
    ),
    "world_size": ((None,), _COUNTED),
}
"""Settings of TRL 0.11 that are not honoured: accepted values, and what to use instead."""


@partial(refusing_unsupported, instead=CLASSIC_INSTEAD)
@dataclass(frozen=True, kw_only=True)
class ClassicPPOConfig:
    """Settings of the classic PPO of TRL (up to 0.11), under the same names.

    Raises:
        ConfigError: a value is out of range, or batch_size is no multiple of mini_batch_size x
            gradient_accumulation_steps.
    """

    exp_name: str = "ppo"
    """Name of the run."""

    model_name: str = "gpt2"
    """The policy to load; only the script reads it."""

    query_dataset: str = "stanfordnlp/imdb"
    """The data set to load; only the script reads it."""

    reward_model: str = "sentiment-analysis:lvwerra/distilbert-imdb"
    """The reward model to load; only the script reads it."""

    task_name: str | None = None
    """A description of the run; only the script reads it."""

    log_with: Literal["wandb", "tensorboard", "mlflow"] | None = None
    """The tracker that `log_stats` sends metrics to."""

    output_dir: str = "trainer_output"
    """Folder for tables of texts."""

    seed: int = 0
    """Seed of the order of data and minibatches, and of torch when the trainer is created."""

    steps: int = 20_000
    """Responses of the full run; only the script reads it."""

    learning_rate: float = 1.41e-5
    """Learning rate of Adam, if the script passes no optimizer."""

    batch_size: int = 128
    """Responses per `step` in one process."""

    mini_batch_size: int = 128
    """Responses per forward and backward pass."""

    gradient_accumulation_steps: int = 1
    """Passes per optimizer step."""

    ppo_epochs: int = 4
    """Passes over each batch."""

    temperature: float = 1.0
    """The policy is softmax(logits / temperature) in both `generate` and `step`."""

    adap_kl_ctrl: bool = True
    """Adapt the KL coefficient to `target`."""

    init_kl_coef: float = 0.2
    """Initial weight of the KL divergence in the reward."""

    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    """Estimator of the KL divergence: k1, abs, k2 or exact, in this order."""

    target: float = 6.0
    """KL divergence in nats per response that the adaptive coefficient aims at."""

    horizon: float = 10_000
    """Episodes in which the adaptive coefficient changes by at most about a fifth."""

    gamma: float = 1.0
    """Discount per token."""

    lam: float = 0.95
    """Lambda of generalized advantage estimation."""

    cliprange: float = 0.2
    """The probability ratio is clipped to 1 - cliprange .. 1 + cliprange."""

    cliprange_value: float = 0.2
    """Maximum distance of a new value from the value at sampling time."""

    vf_coef: float = 0.1
    """Weight of the value loss in the total loss."""

    max_grad_norm: float | None = None
    """Maximum norm of the gradient; None does not clip."""

    early_stopping: bool = False
    """Stop the passes over a batch when the policy has moved by 1.5 x `target_kl`."""

    target_kl: float = 1.0
    """Nats per token, for early stopping."""

    ratio_threshold: float = 10.0
    """An optimizer step with a mean probability ratio above this value is skipped."""

    use_score_scaling: bool = False
    """Divide scores by their running standard deviation."""

    use_score_norm: bool = False
    """Subtract the running mean of the scores first; needs use_score_scaling."""

    score_clip: float | None = None
    """Clip scores to -score_clip .. score_clip after scaling."""

    whiten_rewards: bool = False
    """Divide token rewards by their standard deviation over the batch, and keep their mean."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""

    remove_unused_columns: bool = True
    """`prepare_dataloader` keeps only input_ids, attention_mask, label, query and response."""

    dataset_num_proc: int | None = None
    """Processes that tokenize the data set; only the script reads it."""

    def __post_init__(self) -> None:
        """Check the values; the settings of the update check the remaining ones."""
        for name in (
            "batch_size mini_batch_size gradient_accumulation_steps steps ppo_epochs"
        ).split():
            require_count(self, name)
        require(self, "kl_penalty", self.kl_penalty in KL_ESTIMATORS, "kl, abs, mse or full")
        require(self, "init_kl_coef", self.init_kl_coef >= 0, "at least 0")
        require(self, "target", self.target > 0, "above 0")
        is_count = self.horizon >= 1 and self.horizon == int(self.horizon)
        require(self, "horizon", is_count, "a whole number, at least 1")
        norm = self.max_grad_norm
        require(self, "max_grad_norm", norm is None or norm > 0, "above 0, or None")
        per_step = self.mini_batch_size * self.gradient_accumulation_steps
        if left := self.batch_size % per_step:
            raise ConfigError(
                f"batch_size={self.batch_size} is no multiple of mini_batch_size x "
                f"gradient_accumulation_steps = {per_step}: {left} responses would be left over."
            )
        self.update_settings()

    @property
    def total_ppo_epochs(self) -> int:
        """Calls of `step` in the full run; only the script reads it."""
        return math.ceil(self.steps / self.batch_size)

    def update_settings(self) -> PPOConfig:
        """Return these settings under the names of `ppo_core.PPOConfig`."""
        return PPOConfig(
            exp_name=self.exp_name,
            output_dir=self.output_dir,
            report_to=self.log_with or "none",
            seed=self.seed,
            learning_rate=self.learning_rate,
            lr_scheduler_type="constant",
            total_episodes=self.steps,
            per_device_train_batch_size=self.mini_batch_size,
            local_rollout_forward_batch_size=self.mini_batch_size,
            gradient_accumulation_steps=self.batch_size // self.mini_batch_size,
            num_mini_batches=self.batch_size
            // (self.mini_batch_size * self.gradient_accumulation_steps),
            num_ppo_epochs=self.ppo_epochs,
            temperature=self.temperature,
            kl_coef=self.init_kl_coef,
            kl_estimator=KL_ESTIMATORS[self.kl_penalty],
            kl_target=self.target if self.adap_kl_ctrl and self.init_kl_coef else None,
            kl_horizon=int(self.horizon),
            gamma=self.gamma,
            lam=self.lam,
            cliprange=self.cliprange,
            cliprange_value=self.cliprange_value,
            vf_coef=self.vf_coef,
            max_grad_norm=self.max_grad_norm or math.inf,
            target_kl=self.target_kl if self.early_stopping else None,
            ratio_threshold=self.ratio_threshold,
            use_score_scaling=self.use_score_scaling,
            use_score_norm=self.use_score_norm,
            score_clip=self.score_clip,
            whiten_rewards=self.whiten_rewards,
            gradient_checkpointing=self.gradient_checkpointing,
            save_strategy="no",
        )
