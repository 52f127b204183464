"""Settings of a run around the algorithm: steps, optimizer, files, logs, the hub, the machine."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What `transformers.TrainingArguments` calls by the same names, as far as PPO honours it.

    Every other name of `TrainingArguments` is refused, with what to use instead
    (`ppo_core.config.unsupported_settings`). Counts of steps are PPO updates.
    """

    output_dir: str = "trainer_output"
    """Folder for checkpoints, the model card and the final policy; made when first written."""

    exp_name: str = "ppo"
    """Names the run where `run_name` does not."""

    run_name: str | None = None
    """Name of the run where the metrics go; None takes `exp_name`."""

    seed: int = 1
    """Seed of the order of the prompts, of sampling and of the order of the updates."""

    per_device_train_batch_size: int = 8
    """Responses of full length in one forward and backward pass of one process, and more of shorter
    ones; memory grows with it."""

    per_device_eval_batch_size: int = 8
    """Evaluation prompts answered together by one process."""

    gradient_accumulation_steps: int = 1
    """Passes of `per_device_train_batch_size` responses whose prompts are sampled together."""

    num_train_epochs: float = 3.0
    """Passes over the prompts, where `total_episodes` does not set the length of the run."""

    learning_rate: float = 3e-6
    """Peak learning rate of the policy, and of the critic unless it has its own."""

    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = "linear"
    """How the learning rate falls over the optimizer steps of the run, or stays."""

    warmup_steps: float = 0
    """Optimizer steps in which the learning rate rises from 0; below 1 a share of the run."""

    warmup_ratio: float = 0.0
    """The same, always as a share."""

    weight_decay: float = 0.0
    """AdamW's weight decay, per step and unit of learning rate; norms and biases have none."""

    adam_beta1: float = 0.9
    """AdamW's decay of the mean of the gradient."""

    adam_beta2: float = 0.999
    """AdamW's decay of the mean of the squared gradient."""

    adam_epsilon: float = 1e-5
    """AdamW's epsilon."""

    max_grad_norm: float = 1.0
    """Gradients of policy and critic together are scaled down to this norm."""

    bf16: bool | None = None
    """Sample, score and train in bfloat16 by autocast, with master weights in fp32. None: where the
    machine multiplies bfloat16 faster and the policy is wide enough to gain by it (a GPU; a CPU
    with avx512_bf16 or AMX for hidden states of 192 numbers or more). `PPOTrainer.args` and
    checkpoints keep what was chosen."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    use_cpu: bool = False
    """Stay on the CPU where there is a GPU."""

    sharding: Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp2"] | None = None
    """How several processes share the work: data parallel (ddp); the optimizer's states (zero1),
    gradients (zero2) and weights (zero3, fsdp2) in shards. None: as `accelerate launch` says, else
    ddp where there are several."""

    offload: bool = False
    """Keep shards on the CPU: optimizer states, and under zero3 and fsdp2 weights as well."""

    ddp_timeout: int = 1800
    """Seconds that a process waits for the others before the run fails."""

    deepspeed: str | None = None
    """File with DeepSpeed's settings; under `accelerate launch` its config file says it."""

    vllm_server_base_url: str = "http://localhost:8000"
    """Address of the vLLM server, where `use_vllm` asks one; VLLM_API_KEY is its key, if it has
    one."""

    vllm_weights_dir: str | None = None
    """Folder for the weights on their way to that server, which must see it at the same path;
    /dev/shm is fastest on one machine. It holds one copy of the policy for a moment."""

    vllm_server_timeout: float = 240.0
    """Seconds that the server may take for an answer, or be away."""

    dataset_num_proc: int | None = None
    """Processes that tokenise the prompts; None uses this one."""

    disable_tqdm: bool = False
    """Show no progress bar."""

    report_to: str | list[str] = "none"
    """Where metrics go: none, all, or some of mlflow, wandb, tensorboard (by transformers)."""

    logging_steps: float = 1
    """Updates between two logs; below 1 a share of the run."""

    eval_strategy: Literal["no", "steps"] = "no"
    """Whether the evaluation prompts are answered and scored every `eval_steps`."""

    eval_steps: float | None = None
    """Updates between two evaluations, below 1 a share of the run; None takes `logging_steps`."""

    save_strategy: Literal["no", "steps"] = "steps"
    """Whether a checkpoint is written every `save_steps` and at the end."""

    save_steps: float = 500
    """Updates between two checkpoints; below 1 a share of the run."""

    save_total_limit: int | None = None
    """Checkpoints kept, the oldest go first, at least 2; None keeps all."""

    async_save: bool = False
    """Write checkpoints while the training goes on, from a copy in the CPU's memory."""

    push_to_hub: bool = False
    """Upload the policy to the hub when it is saved."""

    hub_model_id: str | None = None
    """Repository on the hub; None takes the name of `output_dir`."""

    hub_token: str | None = None
    """Token for the hub; None takes that of `hf auth login`."""

    hub_private_repo: bool | None = None
    """Whether a new repository is private; None follows the organisation."""
