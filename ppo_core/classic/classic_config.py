"""Settings of the classic loop, by the names that its scripts use."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ppo_core.config.checks import require, require_count
from ppo_core.config.ppo_config import PPOConfig as UpdateConfig
from ppo_core.config.unsupported_settings import refusing_unsupported
from ppo_core.errors import ConfigError

KL_ESTIMATORS: dict[str, Literal["k1", "k2", "abs", "full"]] = {
    "kl": "k1",
    "abs": "abs",
    "mse": "k2",
    "full": "full",
}
"""What the classic names of KL penalties are called here."""

_COUNTED = "processes are counted where the trainer is made: leave it out"
_LAUNCHED = "start the script with accelerate launch --config_file FILE, or torchrun"
_READ = "it is read from the model: leave it out"
_MEMORY = "there is no such switch: leave it out, and lower mini_batch_size if memory is short"
_BEST = "compare the statistics of step() in the script, and call trainer.push_to_hub(repo_id)"
_PASS = "it is mini_batch_size x gradient_accumulation_steps: set those"

INSTEAD: dict[str, tuple[tuple[object, ...], str]] = {
    "accelerator_kwargs": (({},), _LAUNCHED),
    "backward_batch_size": ((None,), _PASS),
    "compare_steps": ((1,), _BEST),
    "forward_batch_size": ((None,), "set mini_batch_size, which it was another name of"),
    "global_backward_batch_size": ((None,), _COUNTED),
    "global_batch_size": ((None,), _COUNTED),
    "is_encoder_decoder": ((None,), _READ),
    "is_peft_model": ((None,), _READ),
    "optimize_cuda_cache": ((None, False), _MEMORY),
    "optimize_device_cache": ((False,), _MEMORY),
    "project_kwargs": (({},), "set output_dir, and TENSORBOARD_LOGGING_DIR for TensorBoard"),
    "push_to_hub_if_best_kwargs": (({},), _BEST),
    "tracker_kwargs": (({},), "set the environment variables of what log_with names"),
    "tracker_project_name": (
        ("trl",),
        "set WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or TENSORBOARD_LOGGING_DIR",
    ),
    "world_size": ((None,), _COUNTED),
}
"""TRL 0.11's settings that are not honoured: values that change nothing, and what to use."""


@partial(refusing_unsupported, instead=INSTEAD)
@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """What the classic PPO of TRL (up to 0.11) calls by the same names.

    Raises:
        ConfigError: a value is out of range, or batches do not divide each other.
    """

    exp_name: str = "ppo"
    """Name of the run."""

    model_name: str = "gpt2"
    """The policy to load, for the script to read."""

    query_dataset: str = "stanfordnlp/imdb"
    """The data set to load, for the script to read."""

    reward_model: str = "sentiment-analysis:lvwerra/distilbert-imdb"
    """The reward model to load, for the script to read."""

    task_name: str | None = None
    """What the run is about, for the script to read."""

    log_with: Literal["wandb", "tensorboard", "mlflow"] | None = None
    """Where `log_stats` sends metrics."""

    output_dir: str = "trainer_output"
    """Where tables of texts are kept."""

    seed: int = 0
    """Seed of the order of data and updates, and of torch where the trainer is made."""

    steps: int = 20_000
    """Responses of the whole run, for the script to read."""

    learning_rate: float = 1.41e-5
    """Learning rate of Adam, where no optimizer is handed over."""

    batch_size: int = 128
    """Responses of one `step` in one process."""

    mini_batch_size: int = 128
    """Responses in one forward and backward pass."""

    gradient_accumulation_steps: int = 1
    """Passes to one optimizer step."""

    ppo_epochs: int = 4
    """Passes over each batch."""

    temperature: float = 1.0
    """The policy is softmax(logits / temperature), in `generate` and in `step` alike."""

    adap_kl_ctrl: bool = True
    """Adapt the KL coefficient to `target`."""

    init_kl_coef: float = 0.2
    """Weight of the KL divergence in the reward, at first."""

    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    """Estimator of that divergence: k1, abs, k2 or the exact one."""

    target: float = 6.0
    """Nats a response that the coefficient is adapted to."""

    horizon: float = 10_000
    """Episodes over which an adapted coefficient changes by about a fifth at most."""

    gamma: float = 1.0
    """Discount per token."""

    lam: float = 0.95
    """Lambda of generalized advantage estimation."""

    cliprange: float = 0.2
    """The probability ratio is clipped to 1 - cliprange .. 1 + cliprange."""

    cliprange_value: float = 0.2
    """A new value is clipped to this distance from the value at sampling time."""

    vf_coef: float = 0.1
    """Weight of the value loss beside the policy loss."""

    max_grad_norm: float | None = None
    """Gradients are scaled down to this norm; None leaves them."""

    early_stopping: bool = False
    """End the passes over a batch when the policy has moved 1.5 x `target_kl`."""

    target_kl: float = 1.0
    """Nats a token, for early stopping."""

    ratio_threshold: float = 10.0
    """An optimizer step whose mean probability ratio is above it is skipped."""

    use_score_scaling: bool = False
    """Divide scores by their running standard deviation."""

    use_score_norm: bool = False
    """Take their running mean off first; needs use_score_scaling."""

    score_clip: float | None = None
    """Clip scores to -score_clip .. score_clip, after scaling."""

    whiten_rewards: bool = False
    """Divide the token rewards by their standard deviation over the batch; the mean is kept."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""

    remove_unused_columns: bool = True
    """`prepare_dataloader` keeps input_ids, attention_mask, label, query and response alone."""

    dataset_num_proc: int | None = None
    """Processes that tokenise the data set, for the script to read."""

    def __post_init__(self) -> None:
        """Refuse what cannot work; the rest is checked with the settings of an update."""
        for name in (
            "batch_size mini_batch_size gradient_accumulation_steps steps ppo_epochs"
        ).split():
            require_count(self, name)
        require(self, "kl_penalty", self.kl_penalty in KL_ESTIMATORS, "kl, abs, mse or full")
        require(self, "init_kl_coef", self.init_kl_coef >= 0, "at least 0")
        require(self, "target", self.target > 0, "above 0")
        whole = self.horizon >= 1 and self.horizon == int(self.horizon)
        require(self, "horizon", whole, "a whole number, at least 1")
        norm = self.max_grad_norm
        require(self, "max_grad_norm", norm is None or norm > 0, "above 0, or None")
        of_step = self.mini_batch_size * self.gradient_accumulation_steps
        if left := self.batch_size % of_step:
            raise ConfigError(
                f"batch_size={self.batch_size} is no multiple of mini_batch_size x "
                f"gradient_accumulation_steps = {of_step}: {left} responses would be left over."
            )
        self.of_update()

    @property
    def total_ppo_epochs(self) -> int:
        """Calls of `step` in the whole run, for the script to read."""
        return math.ceil(self.steps / self.batch_size)

    def of_update(self) -> UpdateConfig:
        """The same settings as the update reads them."""
        return UpdateConfig(
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
