"""Settings of the classic loop, with the names of TRL 0.11."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ppo_core.config.field_checks import check_fields, require
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.errors import ConfigError
from ppo_core.io.validation import Count, NotNegative, Positive, PositiveOrInf
from ppo_core.trl.script_settings import refusing_unsupported

KL_ESTIMATORS: dict[str, Literal["k1", "k2", "abs", "full"]] = {
    "kl": "k1",
    "abs": "abs",
    "mse": "k2",
    "full": "full",
}
"""Value of kl_penalty -> estimator of the KL divergence."""

SAME = (
    "exp_name output_dir seed learning_rate temperature gamma lam cliprange cliprange_value "
    "vf_coef ratio_threshold use_score_scaling use_score_norm score_clip whiten_rewards "
    "gradient_checkpointing"
).split()
"""Settings that mean the same in `ppo_core.PPOConfig`."""

_COUNTED = "the trainer counts the processes"
_LAUNCHED = "start the script with accelerate launch --config_file FILE, or torchrun"
_READ = "the trainer reads this property from the model"
_MEMORY = "lower mini_batch_size if memory is short"
_BEST = "compare the statistics of step() in the script, and call trainer.push_to_hub(repo_id)"
_PASS = "set mini_batch_size and gradient_accumulation_steps, whose product is this setting"

CLASSIC_INSTEAD: dict[str, tuple[tuple[object, ...], str]] = {
    "accelerator_kwargs": (({},), _LAUNCHED),
    "backward_batch_size": ((None,), _PASS),
    "compare_steps": ((1,), _BEST),
    "forward_batch_size": ((None,), "set mini_batch_size, which has replaced forward_batch_size"),
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
"""Setting of TRL 0.11 without effect here -> (accepted values, advice for other values)."""

CLASSIC_NO_EFFECT = CLASSIC_INSTEAD.keys() - {
    "accelerator_kwargs",
    "forward_batch_size",
    "push_to_hub_if_best_kwargs",
}
"""Settings that change no result. A value that is not accepted is dropped with a warning."""


@partial(refusing_unsupported, instead=CLASSIC_INSTEAD, no_effect=CLASSIC_NO_EFFECT)
@dataclass(frozen=True, kw_only=True)
class ClassicPPOConfig:
    """Settings of the classic PPO of TRL (up to 0.11), under the same names.

    Raises:
        ConfigError: a value is out of range, or batch_size is not a multiple of mini_batch_size x
            gradient_accumulation_steps.
    """

    exp_name: str = "ppo"
    """Name of the run."""

    model_name: str = "gpt2"
    """Policy to load; only the script reads this setting."""

    query_dataset: str = "stanfordnlp/imdb"
    """Data set to load; only the script reads this setting."""

    reward_model: str = "sentiment-analysis:lvwerra/distilbert-imdb"
    """Reward model to load; only the script reads this setting."""

    task_name: str | None = None
    """Description of the run; only the script reads this setting."""

    log_with: str | None = None
    """Tracker to which `log_stats` sends metrics; None: no tracker."""

    output_dir: str = "trainer_output"
    """Folder for tables of queries and responses."""

    seed: int = 0
    """Seed of the order of data and minibatches, and of Python, NumPy and torch when the trainer is
    created."""

    steps: Count = 20_000
    """Number of responses in the run; the script must end its loop by itself."""

    learning_rate: float = 1.41e-5
    """Learning rate of Adam, if the script passes no optimizer."""

    batch_size: Count = 128
    """Number of responses per call of `step` in each process."""

    mini_batch_size: Count = 128
    """Number of responses per forward and backward pass."""

    gradient_accumulation_steps: Count = 1
    """Number of forward and backward passes per optimizer step."""

    ppo_epochs: Count = 4
    """Optimization epochs over each batch of responses."""

    temperature: float = 1.0
    """The policy is softmax(logits / temperature), both in `generate` and in `step`."""

    adap_kl_ctrl: bool = True
    """Adapt the KL coefficient to `target`."""

    init_kl_coef: NotNegative = 0.2
    """Initial weight of the KL divergence in the reward."""

    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    """Estimator of the KL divergence: `kl` is k1, `abs` is abs, `mse` is k2, `full` is exact."""

    target: Positive = 6.0
    """Target of the KL divergence for the adaptive coefficient, in nats per response."""

    horizon: float = 10_000
    """Episodes over which the adaptive coefficient changes by at most about 20%."""

    gamma: float = 1.0
    """Discount factor per token."""

    lam: float = 0.95
    """Lambda of generalized advantage estimation."""

    cliprange: float = 0.2
    """Clip the probability ratio to [1 - cliprange, 1 + cliprange]."""

    cliprange_value: float = 0.2
    """Clip the critic's new values to this distance from the values at sampling time."""

    vf_coef: float = 0.1
    """Weight of the value loss in the total loss."""

    max_grad_norm: PositiveOrInf | None = None
    """Maximum norm of the gradient; None: no clipping."""

    early_stopping: bool = False
    """End the update of a batch once the KL divergence from the policy at sampling time exceeds
    1.5 x `target_kl`."""

    target_kl: float = 1.0
    """Divergence for `early_stopping`, in nats per token."""

    ratio_threshold: float = 10.0
    """Skip optimizer steps whose mean probability ratio exceeds this value."""

    use_score_scaling: bool = False
    """Divide scores by their running standard deviation."""

    use_score_norm: bool = False
    """Subtract the running mean of the scores before scaling; requires use_score_scaling."""

    score_clip: float | None = None
    """Clip scores to [-score_clip, score_clip] after scaling; None: no clipping."""

    whiten_rewards: bool = False
    """Scale token rewards to standard deviation 1 over the batch, without changing their mean."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""

    remove_unused_columns: bool = True
    """In `prepare_dataloader`, keep only input_ids, attention_mask, label, query and response."""

    dataset_num_proc: int | None = None
    """Number of processes that tokenize the data set; only the script reads this setting."""

    def __post_init__(self) -> None:
        """Check the values, some of them by creating the PPOConfig of `update_settings`."""
        check_fields(self, ClassicPPOConfig)
        is_count = self.horizon >= 1 and self.horizon == int(self.horizon)
        require(self, "horizon", is_count, "a whole number, at least 1")
        per_step = self.mini_batch_size * self.gradient_accumulation_steps
        if left := self.batch_size % per_step:
            raise ConfigError(
                f"batch_size={self.batch_size} is not a multiple of mini_batch_size x "
                f"gradient_accumulation_steps = {per_step}, so {left} responses would be left "
                "over. Change one of the three settings."
            )
        self.update_settings()

    @property
    def total_ppo_epochs(self) -> int:
        """Number of calls of `step` in the run: `steps` / batch_size, rounded up."""
        return math.ceil(self.steps / self.batch_size)

    def update_settings(self) -> PPOConfig:
        """Return the equivalent `ppo_core.PPOConfig`."""
        target = self.target if self.adap_kl_ctrl and self.init_kl_coef else None
        return PPOConfig(
            **{name: getattr(self, name) for name in SAME},
            report_to=self.log_with or "none",
            lr_scheduler_type="constant",
            total_episodes=self.steps,
            per_device_train_batch_size=self.mini_batch_size,
            local_rollout_forward_batch_size=self.mini_batch_size,
            gradient_accumulation_steps=self.batch_size // self.mini_batch_size,
            num_mini_batches=self.batch_size
            // (self.mini_batch_size * self.gradient_accumulation_steps),
            num_ppo_epochs=self.ppo_epochs,
            kl_coef=self.init_kl_coef,
            kl_estimator=KL_ESTIMATORS[self.kl_penalty],
            kl_target=target,
            kl_horizon=None if target is None else int(self.horizon),
            max_grad_norm=self.max_grad_norm or math.inf,
            target_kl=self.target_kl if self.early_stopping else None,
            save_strategy="no",
        )
