"""Compute the memory of PPO, from the sizes of models and batches.

The arithmetic counts the tensors that `ppo_core` keeps in each phase of an update. On a GPU, CUDA's
context and unused parts of allocated blocks are not counted, so leave a tenth of the GPU's memory
free.
"""

from dataclasses import dataclass

from pipeline.cost.memory.sizes import (
    BF16,
    FP32,
    LOGIT_COPIES,
    PROCESS,
    Memory,
    ModelSize,
    Shards,
    attention_weights,
    chunk_of_logits,
    kept_activations,
    largest,
    passing_activations,
)
from ppo_core.models.kernels.packed_linear import MAX_NUMEL, MIN_PASSES


@dataclass(frozen=True, kw_only=True)
class PPOSize(Shards):
    """Models and batches of a run of PPO."""

    policy: ModelSize
    critic: ModelSize | None
    """The critic's own model; None for a head on the policy's backbone."""

    rewards: tuple[ModelSize, ...]
    """All models that score responses; empty if only functions and servers score."""

    adapter: int = 0
    """Number of parameters of the policy's adapter; 0 if the policy itself is trained."""

    base_bytes: int = FP32
    """Bytes of a parameter of the frozen policy under an adapter."""

    gathers: bool = True
    """Whether sampling and scoring gather all sharded weights of a model at once
    (`ds3_gather_for_generation`)."""

    averages: bool = False
    """Whether a running average of the policy's trained weights is kept (`ema_decay`)."""

    autocast: bool = False
    """Whether passes compute in bfloat16 (`bf16`)."""

    recomputes: bool = False
    """Whether the backward pass recomputes activations (`gradient_checkpointing`)."""

    prompt_tokens: int
    """Tokens of the longest prompt."""

    response_tokens: int
    """Maximum tokens of a response."""

    sampled_rows: int
    """Responses that a process samples or scores at a time."""

    trained_rows: int
    """Responses in a forward and backward pass of a process."""

    trained_tokens: int
    """Tokens of prompts and responses in a forward and backward pass of a process."""

    on_cpu: bool = False
    """Whether the processes compute on the CPU. Loading models and copying checkpoints then use the
    same memory as the passes."""

    @property
    def trained(self) -> int:
        """Number of trained parameters, all in fp32."""
        policy = self.adapter or self.policy.parameters
        return policy + (self.critic.parameters if self.critic else self.policy.width)


def peak_memory(size: PPOSize) -> Memory:
    """Return the memory of the phase of PPO that needs the most memory."""
    return largest(phases(size))


def phases(size: PPOSize) -> list[Memory]:
    """Return the memory in each phase: sampling, scoring, update, and on a CPU loading and saving.

    Gradients exist only in the update. Optimizer states and the buffers of DistributedDataParallel
    exist in all phases except loading.
    """
    computed = [_sampling(size), _scoring(size), _updating(size)]
    return computed + ([_loading(size), _saving(size)] if size.on_cpu else [])


def host_memory(size: PPOSize) -> int:
    """Return the bytes of main memory that the processes of one machine with GPUs need.

    Each process reads the full models before it shards them or moves them to its GPU. The first
    process also keeps its copies for a checkpoint.
    """
    loading = _full_weights(size) + PROCESS
    return size.processes_of_a_machine * loading + _copies(size)


# --- The phases --------------------------------------------------------------------


def _sampling(size: PPOSize) -> Memory:
    policy, rows = size.policy, size.sampled_rows
    logits = LOGIT_COPIES * FP32 * rows * policy.vocabulary
    # The prompts count twice: transformers fills its own cache, which is then copied.
    tokens = rows * (2 * size.prompt_tokens + size.response_tokens)
    read = _passing(size, policy, rows * size.prompt_tokens)
    gathered = _gathered(size, _module_bytes(size))
    return Memory(
        phase="sampling",
        weights=_weights(size) + gathered + _bf16_copies(size, policy) + _packed(size),
        gradients=size.send_buffers(size.trained),
        optimizer=size.optimizer(size.trained),
        activations=max(read, logits),
        cache=2 * policy.layers * policy.key_width * size.base_bytes * tokens,
        process=_process(size),
    )


def _scoring(size: PPOSize) -> Memory:
    """Memory while the largest of reward model, reference and critic is used."""
    tokens = size.sampled_rows * (size.prompt_tokens + size.response_tokens)
    rewards = [(_gathered(size, FP32 * model.parameters), model) for model in size.rewards]
    module = _gathered(size, _module_bytes(size)) + _bf16_copies(size, size.policy), size.policy
    gathered, model = max(
        (*rewards, module), key=lambda one: one[0] + _passing(size, one[1], tokens)
    )
    return Memory(
        phase="scoring",
        weights=_weights(size) + gathered,
        gradients=size.send_buffers(size.trained),
        optimizer=size.optimizer(size.trained),
        activations=_passing(size, model, tokens) + _chunk(size, size.sampled_rows),
        process=_process(size),
    )


def _updating(size: PPOSize) -> Memory:
    models = [size.policy, *([size.critic] if size.critic else [])]
    one_by_one = size.processes == 1 and size.sharding in ("none", "ddp")
    together = max if one_by_one else sum
    passes = together(_kept(size, model) + _bf16_copies(size, model) for model in models)
    sent = size.whole_layers(models, size.base_bytes if size.adapter else FP32)
    if not (size.adapter or size.shards_weights):
        sent += FP32 * size.policy.width * size.policy.vocabulary  # gradient of the head in a chunk
    return Memory(
        phase="update",
        weights=_weights(size),
        gradients=size.gradients(size.trained) + size.send_buffers(size.trained),
        optimizer=size.optimizer(size.trained),
        activations=passes + sent + _chunk(size, size.trained_rows),
        process=_process(size),
    )


def _loading(size: PPOSize) -> Memory:
    """Memory after a process has read or copied all models and before it shards them."""
    return Memory(
        phase="loading",
        weights=_full_weights(size),
        gradients=0,
        optimizer=0,
        activations=0,
        process=_process(size),
    )


def _saving(size: PPOSize) -> Memory:
    """Memory of the first process while it copies its part of a checkpoint."""
    return Memory(
        phase="saving",
        weights=_weights(size),
        gradients=size.send_buffers(size.trained),
        optimizer=size.optimizer(size.trained),
        activations=0,
        copies=_copies(size),
        process=_process(size),
    )


# --- Parts -------------------------------------------------------------------------


def _process(size: PPOSize) -> int:
    return PROCESS if size.on_cpu else 0


def _module_bytes(size: PPOSize) -> int:
    """Bytes of all weights of policy and critic."""
    frozen = size.base_bytes * size.policy.parameters if size.adapter else 0
    return frozen + FP32 * size.trained


def _full_weights(size: PPOSize) -> int:
    """Bytes of all models, unsharded. With an adapter, the base is also the reference."""
    reference = 0 if size.adapter else FP32 * size.policy.parameters
    rewards = sum(model.parameters for model in size.rewards)
    return _module_bytes(size) + reference + FP32 * rewards


def _weights(size: PPOSize) -> int:
    """Bytes of all models in a process, including the running average of the policy in fp32."""
    average = FP32 * (size.adapter or size.policy.parameters) if size.averages else 0
    return size.weights(_full_weights(size)) + average


def _copies(size: PPOSize) -> int:
    """Bytes of the copies that the first process makes for a checkpoint.

    It copies all trained weights and its own share of the optimizer's moments. Each process writes
    its share of the moments.
    """
    return FP32 * size.trained + 2 * FP32 * size.trained // size.processes


def _gathered(size: PPOSize, weights: int) -> int:
    """Bytes of the gathered weights of a model that has `weights` bytes in full.

    Without `gathers`, at most two layers and the weights outside the layers are gathered, and
    each model is assumed to have the sizes of the policy in fp32.
    """
    if not size.shards_weights:
        return 0
    if size.gathers:
        return weights
    whole = size.policy.outside_layers + 2 * size.policy.of_a_layer
    return min(weights, FP32 * whole)


def _bf16_copies(size: PPOSize, model: ModelSize) -> int:
    """Bytes of the bfloat16 copies of trained weights that autocast keeps during passes."""
    if not size.autocast:
        return 0
    is_frozen = size.adapter and model is size.policy
    return BF16 * (size.adapter if is_frozen else model.parameters)


def _packed(size: PPOSize) -> int:
    """Bytes of the matrices that oneDNN packs for decoding with unsharded weights on a CPU."""
    numbers = size.policy.multiplied
    is_packed = (
        size.on_cpu
        and not (size.shards_weights or size.adapter or size.autocast)
        and size.response_tokens >= MIN_PASSES
        and numbers <= MAX_NUMEL
    )
    return FP32 * numbers if is_packed else 0


def _passing(size: PPOSize, model: ModelSize, tokens: int) -> int:
    """Bytes of the activations of one layer in a pass without gradients."""
    return passing_activations(
        model,
        tokens,
        autocast=size.autocast,
        adapted=bool(size.adapter) and model is size.policy,
    )


def _chunk(size: PPOSize, rows: int) -> int:
    """Bytes of the logits of a chunk of response tokens."""
    return chunk_of_logits(size.policy, rows * size.response_tokens, autocast=size.autocast)


def _kept(size: PPOSize, model: ModelSize) -> int:
    """Bytes of the activations that the backward pass of one model reads."""
    kept = kept_activations(
        model,
        size.trained_tokens,
        autocast=size.autocast,
        recomputes=size.recomputes,
        adapted=bool(size.adapter) and model is size.policy,
    )
    if not size.on_cpu or size.shards_weights or size.recomputes:
        return kept
    longest = size.prompt_tokens + size.response_tokens
    return kept + attention_weights(model, size.trained_tokens, longest)
