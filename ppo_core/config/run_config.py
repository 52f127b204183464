"""Settings of a run that are not specific to PPO: optimizer, hardware, checkpoints, logs, hub."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ppo_core.io.validation import (
    Count,
    Interval,
    NotNegative,
    Positive,
    PositiveOrInf,
    Seed,
    Share,
    ShareBelow1,
    Steps,
)

Sharding: TypeAlias = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp2"]
"""One process, data parallel, the three stages of DeepSpeed's ZeRO, or PyTorch's FSDP2."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings that are not specific to PPO; most are named as in `TrainingArguments`.

    Commands and scripts accept the other arguments of `transformers.TrainingArguments` only with
    values that change no result. For other values, the error names an alternative
    (`ppo_core.config.unsupported_settings`). `logging_steps`, `eval_steps` and `save_steps` count
    PPO updates.
    """

    output_dir: str = "trainer_output"
    """Folder for checkpoints, the model card and the final policy; created when needed."""

    exp_name: str = "ppo"
    """Name of the run if `run_name` is None."""

    run_name: str | None = None
    """Name of the run in the metric integrations of `report_to`; None: `exp_name`."""

    seed: Seed = 1
    """Random seed of prompt order, sampling and minibatch order."""

    per_device_train_batch_size: Count = 8
    """Sequences (prompt and response) of the greatest length in one forward and backward pass of
    one process; a pass takes more sequences if they are shorter. Memory grows with this number."""

    per_device_eval_batch_size: Count = 8
    """Evaluation prompts answered in one batch per process."""

    gradient_accumulation_steps: Count = 1
    """Factor in the default of `batch_size`."""

    num_train_epochs: Positive = 3.0
    """Passes over the prompts; used if neither `total_episodes` nor `max_steps` is set."""

    max_steps: int = -1
    """Maximum number of PPO updates, used instead of `num_train_epochs`; -1: no limit."""

    learning_rate: NotNegative = 3e-6
    """Peak learning rate of the policy, and of the critic unless `critic_learning_rate` is set."""

    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "cosine_with_restarts",
        "constant",
        "constant_with_warmup",
        "polynomial",
        "inverse_sqrt",
    ] = "linear"
    """Schedule of the learning rate over the optimizer steps of the run."""

    warmup_steps: Steps = 0
    """Optimizer steps over which the learning rate rises from 0; values below 1 are a fraction of
    the run."""

    warmup_ratio: Share = 0.0
    """Warm-up as a fraction of the run's optimizer steps; only if `warmup_steps` is not set."""

    weight_decay: NotNegative = 0.0
    """AdamW's weight decay; not applied to norms and biases."""

    adam_beta1: ShareBelow1 = 0.9
    """AdamW's decay rate of the first moment of the gradient."""

    adam_beta2: ShareBelow1 = 0.999
    """AdamW's decay rate of the second moment of the gradient."""

    adam_epsilon: Positive = 1e-5
    """AdamW's epsilon."""

    max_grad_norm: PositiveOrInf = 1.0
    """Maximum norm of the joint gradient of policy and critic; larger gradients are clipped."""

    bf16: bool | None = None
    """Sample, score and train under bfloat16 autocast, with fp32 master weights. None: True if
    `accelerate launch` sets bf16, or if bfloat16 is usually faster: on a GPU that supports it, or
    on a CPU with avx512_bf16 or AMX if the hidden size is at least 192. None is False for float64
    weights, and for an adapter whose base is not in fp32. `PPOTrainer.args` and checkpoints contain
    the chosen value."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and takes about a third more
    time."""

    use_cpu: bool = False
    """Use the CPU even if there is a GPU."""

    sharding: Sharding | None = None
    """Parallelism over several processes: `ddp` replicates all state; zero1 shards optimizer
    states, zero2 also gradients, zero3 and fsdp2 also weights. None: the choice of
    `accelerate launch`, or ddp if accelerate makes no choice and there are several processes."""

    offload: bool = False
    """Keep sharded optimizer states, and with zero3 or fsdp2 also sharded weights, in CPU
    memory."""

    ddp_timeout: Count = 1800
    """Seconds that a process waits for the other processes before the run fails."""

    deepspeed: str | None = None
    """JSON file of DeepSpeed settings. With `accelerate launch`, name the file in accelerate's
    config file instead."""

    vllm_server_base_url: str = "http://localhost:8000"
    """URL of the vLLM server for `use_vllm`. The environment variable VLLM_API_KEY holds the
    server's API key, if it has one."""

    vllm_weights_dir: str | None = None
    """Folder from which the vLLM server reads the policy's weights, at an identical path on both
    machines; on a single machine /dev/shm is fastest. Needs space for one copy of the policy."""

    vllm_server_timeout: Positive = 240.0
    """Seconds to wait for a reply of the vLLM server, or for the server to become reachable."""

    dataset_num_proc: Count | None = None
    """Number of additional processes that tokenize the prompts; None or 1: none."""

    disable_tqdm: bool = False
    """Show no progress bar."""

    report_to: str | list[str] = "none"
    """Metric integrations of transformers: none, all, or a list such as mlflow, wandb,
    tensorboard."""

    logging_steps: Interval = 1
    """Updates between two logs; values below 1 are a fraction of the run."""

    eval_strategy: Literal["no", "steps"] = "no"
    """`steps` answers and scores the evaluation prompts every `eval_steps` updates; `no` never
    evaluates."""

    eval_steps: Interval | None = None
    """Updates between two evaluations; values below 1 are a fraction of the run; None:
    `logging_steps`."""

    save_strategy: Literal["no", "steps"] = "steps"
    """`steps` writes a checkpoint every `save_steps` updates and at the end; `no` writes none."""

    save_steps: Interval = 500
    """Updates between two checkpoints; values below 1 are a fraction of the run."""

    save_total_limit: Count | None = None
    """Maximum number of checkpoints, at least 2; the oldest is deleted first. None keeps all."""

    async_save: bool = False
    """Write checkpoints in the background while training continues, from a copy in CPU memory. With
    a callback that has its own on_save, such as that of W&B, training waits for the checkpoint."""

    push_to_hub: bool = False
    """Upload the policy to the Hugging Face Hub when it is saved."""

    hub_model_id: str | None = None
    """Repository on the hub; None: the name of `output_dir`."""

    hub_token: str | None = None
    """Access token for the hub; None: the token of `hf auth login`."""

    hub_private_repo: bool | None = None
    """Make a new repository private; None: the default of the organization."""
