"""Compute the memory of PPO on one device, from the sizes of models and batches.

The arithmetic follows what this package holds in each phase of an update; it counts tensors. CUDA
itself (about 1 GiB) and unused parts of allocated blocks come on top, so leave a tenth free.
"""

from dataclasses import dataclass

from ppo_core.distributed.strategy import Sharding

FP32, BF16 = 4, 2
"""Bytes of a number."""

LOGITS_PER_CHUNK = 2**23
"""Logits that the LM head computes at a time in scoring and in the loss (`ChunkedLMHead`)."""

LOGIT_COPIES = 3
"""Copies of logits in fp32 while tokens are drawn, or probabilities computed."""

ZERO_BUCKET = 500_000_000
"""Gradients that DeepSpeed collects before it sends them (its default reduce_bucket_size)."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a language model or a classifier."""

    parameters: int
    """Number of parameters; tied ones count once."""

    outside_layers: int
    """Number of parameters outside the layers: embeddings, head and last norm."""

    layers: int
    width: int
    """Hidden size, D."""

    mlp_width: int
    """Width inside the MLP, I."""

    is_gated: bool
    """Whether the MLP is gated, as in Llama and Qwen."""

    key_width: int
    """Numbers of a token's keys in a layer: heads of the keys x size of a head."""

    vocabulary: int
    """Number of logits of a token."""

    @property
    def of_a_layer(self) -> int:
        """Number of parameters of a layer."""
        return (self.parameters - self.outside_layers) // self.layers


@dataclass(frozen=True, kw_only=True)
class PPOSize:
    """Models and batches of a run of PPO."""

    policy: ModelSize
    critic: ModelSize | None
    """The critic's own model; None for a head on the policy's backbone."""

    reward: ModelSize
    adapter: int = 0
    """Number of parameters of the policy's adapter; 0 trains the policy itself."""

    base_bytes: int = FP32
    """Bytes of a parameter of the policy under an adapter."""

    sharding: Sharding = "none"
    processes: int = 1
    gathers: bool = True
    """Whether sharded weights are gathered at once for sampling (`ds3_gather_for_generation`)."""

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

    trained_tokens: int
    """Tokens of prompts and responses in a forward and backward pass of a process."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device in one phase of an update."""

    phase: str
    weights: int
    """Policy, critic, reference and reward model, with their gathered and bfloat16 copies."""

    gradients: int
    optimizer: int
    activations: int
    """Activations, logits, and the buffers of gradients that are sent."""

    cache: int = 0
    """Keys and values of sampled tokens."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache


def peak_memory(size: PPOSize) -> Memory:
    """Return the memory of the phase of an update that needs most."""
    return max(phases(size), key=lambda memory: memory.total)


def phases(size: PPOSize) -> list[Memory]:
    """Return the memory while responses are sampled, while they are scored, and in the update.

    Gradients exist only in the update, the optimizer's states always.
    """
    return [_sampling(size), _scoring(size), _updating(size)]


def describe_memory(memory: Memory, device: str) -> str:
    """Return the memory as one line; `device` is GPU or process."""
    parts = ", ".join(
        f"{name} {getattr(memory, name) / 2**30:.1f}"
        for name in ("weights", "gradients", "optimizer", "activations", "cache")
        if getattr(memory, name)
    )
    return (
        f"memory: about {memory.total / 2**30:.1f} GiB per {device}, computed for the "
        f"{memory.phase} of PPO ({parts})"
    )


# --- The phases --------------------------------------------------------------------


def _sampling(size: PPOSize) -> Memory:
    policy, rows = size.policy, size.sampled_rows
    logits = LOGIT_COPIES * FP32 * rows * policy.vocabulary
    # Two times the prompts: transformers fills a cache of its own, which is then copied.
    tokens = rows * (2 * size.prompt_tokens + size.response_tokens)
    return Memory(
        phase="sampling",
        weights=_weights(size) + _gathered(size, _module_bytes(size)) + _bf16_copies(size, policy),
        gradients=0,
        optimizer=_optimizer(size),
        activations=max(_without_gradients(size, policy, rows * size.prompt_tokens), logits),
        cache=2 * policy.layers * policy.key_width * size.base_bytes * tokens,
    )


def _scoring(size: PPOSize) -> Memory:
    """Memory while the largest of reward model, reference and critic is used."""
    tokens = size.sampled_rows * (size.prompt_tokens + size.response_tokens)
    reward = _gathered(size, FP32 * size.reward.parameters), size.reward
    module = _gathered(size, _module_bytes(size)) + _bf16_copies(size, size.policy), size.policy
    gathered, model = max(
        (reward, module), key=lambda one: one[0] + _without_gradients(size, one[1], tokens)
    )
    return Memory(
        phase="scoring",
        weights=_weights(size) + gathered,
        gradients=0,
        optimizer=_optimizer(size),
        activations=_without_gradients(size, model, tokens) + _chunk(),
    )


def _updating(size: PPOSize) -> Memory:
    models = [size.policy, *([size.critic] if size.critic else [])]
    one_by_one = size.processes == 1 and size.sharding in ("none", "ddp")
    together = max if one_by_one else sum
    passes = together(_with_gradients(size, model) + _bf16_copies(size, model) for model in models)
    sent = FP32 * ZERO_BUCKET if size.sharding.startswith("zero") else 0
    if size.sharding in ("zero3", "fsdp2"):
        # Weights and gradients of two layers, and of what is outside the layers, are whole.
        whole = sum(2 * model.of_a_layer + model.outside_layers for model in models)
        sent += 2 * (size.base_bytes if size.adapter else FP32) * whole
    elif not size.adapter:
        sent += FP32 * size.policy.width * size.policy.vocabulary  # gradient of the head in a chunk
    return Memory(
        phase="update",
        weights=_weights(size),
        gradients=_gradients(size),
        optimizer=_optimizer(size),
        activations=passes + sent + _chunk(),
    )


# --- Parts -------------------------------------------------------------------------


def _trained(size: PPOSize) -> int:
    """Number of trained parameters, all in fp32."""
    policy = size.adapter or size.policy.parameters
    return policy + (size.critic.parameters if size.critic else size.policy.width)


def _module_bytes(size: PPOSize) -> int:
    """Bytes of all weights of policy and critic."""
    frozen = size.base_bytes * size.policy.parameters if size.adapter else 0
    return frozen + FP32 * _trained(size)


def _weights(size: PPOSize) -> int:
    """Bytes of all weights of a process; the reference of an adapter is the base."""
    reference = 0 if size.adapter else FP32 * size.policy.parameters
    whole = _module_bytes(size) + reference + FP32 * size.reward.parameters
    return whole // (size.processes if size.sharding in ("zero3", "fsdp2") else 1)


def _gathered(size: PPOSize, weights: int) -> int:
    """Bytes of gathered weights, of a model with so many bytes of weights."""
    if size.sharding not in ("zero3", "fsdp2"):
        return 0
    if size.gathers:
        return weights
    whole = size.policy.outside_layers + 2 * size.policy.of_a_layer
    return min(weights, FP32 * whole)


def _bf16_copies(size: PPOSize, model: ModelSize) -> int:
    """Bytes of the copies in bfloat16 that autocast keeps of trained weights during passes."""
    if not size.autocast:
        return 0
    is_frozen = size.adapter and model is size.policy
    return BF16 * (size.adapter if is_frozen else model.parameters)


def _gradients(size: PPOSize) -> int:
    gradients = FP32 * _trained(size)
    if size.sharding in ("zero2", "zero3", "fsdp2"):
        return gradients // size.processes
    # DistributedDataParallel copies the gradients into buffers, which it sends.
    return gradients * (2 if size.sharding == "ddp" and size.processes > 1 else 1)


def _optimizer(size: PPOSize) -> int:
    """Bytes of AdamW's two moments; ZeRO-1 and -2 hold another copy of their shard of weights."""
    numbers = 3 if size.sharding in ("zero1", "zero2") else 2
    shards = 1 if size.sharding in ("none", "ddp") else size.processes
    return numbers * FP32 * _trained(size) // shards


def _chunk() -> int:
    """Bytes of a chunk of logits."""
    return LOGIT_COPIES * FP32 * LOGITS_PER_CHUNK


def _without_gradients(size: PPOSize, model: ModelSize, tokens: int) -> int:
    """Bytes of the activations of one layer, which the next layer replaces."""
    inside = BF16 if size.autocast else FP32
    return tokens * (4 * FP32 * model.width + 3 * inside * model.mlp_width)


def _with_gradients(size: PPOSize, model: ModelSize) -> int:
    """Bytes of the activations that a backward pass reads.

    A layer keeps, for each token: of both norms the input, the normalised input and the output;
    queries, keys, values and the mixed values; and inside the MLP 4 tensors if it is gated, else
    2. With adapters, also the input of each adapted layer. If activations are recomputed, every
    layer keeps its input, and one layer all of these.
    """
    inside = BF16 if size.autocast else FP32
    wide = 4 if model.is_gated else 2
    layer = 4 * FP32 * model.width + inside * (
        4 * model.width + 2 * model.key_width + wide * model.mlp_width
    )
    if size.adapter and model is size.policy:
        layer += inside * (6 * model.width + model.mlp_width)
    if size.recomputes:
        return size.trained_tokens * (layer + FP32 * model.width * model.layers)
    return size.trained_tokens * layer * model.layers
