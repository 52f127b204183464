"""Sizes of models, and the memory of a training in its phases.

The arithmetic counts the tensors that `ppo_core` keeps. `PROCESS` is the memory of a process in
addition to its tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt

from ppo_core.config.run_config import Sharding
from ppo_core.distributed.choose_sharding import SHARD_WEIGHTS
from ppo_core.models.kernels.attention import BLOCK, MAX_SCORES
from ppo_core.models.lm_head import LOGITS_PER_CHUNK

FP32, BF16 = 4, 2
"""Bytes of a number in fp32 and in bfloat16."""

PROCESS = 650 * 2**20
"""Bytes of a process in addition to its tensors: the interpreter, the libraries that a training
imports, and the memory that these libraries keep. Measured with the CPU build of torch 2.13 and
transformers 5.23: 587 MiB are resident before the models, `KEPT_MATMULS` compiled matmuls take
about 1 MiB each, and the threads and connections of a training take the rest."""

LOGIT_COPIES = 3
"""Number of fp32 copies of the logits while tokens are sampled, and in the loss under autocast,
where autograd keeps the logits, the probabilities and the gradient."""

ZERO_BUCKET = 500_000_000
"""Number of gradients that DeepSpeed collects before it sends them (default of its setting
reduce_bucket_size)."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes of a language model or a classifier."""

    parameters: int
    """Number of parameters; tied parameters count once."""

    outside_layers: int
    """Number of parameters outside the layers: embeddings, head and last norm."""

    layers: int
    width: int
    """Hidden size, D."""

    mlp_width: int
    """Width inside the MLP, I."""

    is_gated: bool
    """Whether the MLP is gated, as in Llama and Qwen."""

    heads: int
    """Number of query heads, H."""

    key_width: int
    """Width of a token's keys in a layer: number of key heads x size of a head."""

    vocabulary: int
    """Number of logits per token."""

    @property
    def of_a_layer(self) -> int:
        """Number of parameters of a layer."""
        return (self.parameters - self.outside_layers) // self.layers

    @property
    def multiplied(self) -> int:
        """Number of weights that multiply a token: layers and LM head, without embeddings."""
        return self.parameters - self.outside_layers + self.width * self.vocabulary


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of memory on one device or in one process, in one phase of a training."""

    phase: str
    weights: int
    """Weights of all models, and copies of them: gathered from shards, cast to bfloat16, or packed
    by oneDNN for decoding."""

    gradients: int
    """Gradients, and the buffers in which DistributedDataParallel sends them."""

    optimizer: int
    activations: int
    """Activations, logits, and what `Shards.whole_layers` counts: gathered layers, and gradients
    that DeepSpeed or FSDP2 has not sent yet."""

    cache: int = 0
    """Keys and values of sampled tokens."""

    copies: int = 0
    """Copies of weights and optimizer states for a checkpoint."""

    process: int
    """Memory of a process on a CPU for everything but tensors, such as libraries. It is 0 on a GPU:
    CUDA's context (about 1 GiB) and the allocator's fragmentation are not counted, so a tenth of
    the GPU's memory should stay free."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, name) for name in PARTS)


PARTS = ("weights", "gradients", "optimizer", "activations", "cache", "copies", "process")
"""Names of the parts of a `Memory`."""


def largest(phases: Iterable[Memory]) -> Memory:
    """Return the memory of the phase that needs the most memory."""
    return max(phases, key=lambda memory: memory.total)


def describe_training_memory(memory: Memory, device: str, training: str) -> str:
    """Return the memory as one line; `device` is GPU or process."""
    parts = ", ".join(
        f"{name} {getattr(memory, name) / 2**30:.1f}" for name in PARTS if getattr(memory, name)
    )
    return (
        f"memory: about {memory.total / 2**30:.1f} GiB per {device}, computed for the "
        f"{memory.phase} of {training} ({parts})"
    )


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How the processes of a training share its tensors."""

    sharding: Sharding = "none"
    processes: int = 1
    """Number of processes on all machines."""

    machines: int = 1

    @property
    def processes_of_a_machine(self) -> int:
        """Number of processes on one machine."""
        return self.processes // self.machines

    @property
    def shards_weights(self) -> bool:
        """Whether each process holds only a share of the weights."""
        return self.sharding in SHARD_WEIGHTS

    def weights(self, size: int) -> int:
        """Return the bytes that a process holds of weights with `size` bytes in total."""
        return size // (self.processes if self.shards_weights else 1)

    def gradients(self, trained: int) -> int:
        """Return the bytes of gradients that a process holds for `trained` parameters."""
        size = FP32 * trained
        if self.sharding in ("zero2", "zero3", "fsdp2"):
            return size // self.processes
        return size

    def send_buffers(self, trained: int) -> int:
        """Return the bytes of the buffers that DistributedDataParallel allocates at its start.

        Only the sharding "ddp" with several processes has such buffers.
        """
        return FP32 * trained if self.sharding == "ddp" and self.processes > 1 else 0

    def optimizer(self, trained: int) -> int:
        """Return the bytes of AdamW's moments in a process.

        Under ZeRO-1 and ZeRO-2, a copy of the process's share of the weights is included.
        """
        numbers = 3 if self.sharding in ("zero1", "zero2") else 2
        shards = 1 if self.sharding in ("none", "ddp") else self.processes
        return numbers * FP32 * trained // shards

    def whole_layers(self, models: Iterable[ModelSize], numbers: int) -> int:
        """Return the bytes of gathered weights and of unsent gradients in a backward pass.

        Under zero3 and fsdp2, two layers and everything outside the layers are unsharded at a time.

        Args:
            models: the trained models.
            numbers: bytes per weight, FP32 or BF16.
        """
        sent = FP32 * ZERO_BUCKET if self.sharding.startswith("zero") else 0
        if self.shards_weights:
            sent += sum(
                2 * numbers * (2 * model.of_a_layer + model.outside_layers) for model in models
            )
        return sent


def kept_activations(
    model: ModelSize, tokens: int, *, autocast: bool, recomputes: bool, adapted: bool
) -> int:
    """Return the bytes of the activations that a backward pass reads.

    For each token, a layer keeps: for each of its two norms, the norm's input, normalized input and
    output; queries, keys, values and the attention output; and 4 tensors inside a gated MLP, or 2
    inside an ungated MLP. With adapters, a layer also keeps the inputs of adapted linear layers. If
    activations are recomputed, every layer keeps its input, and only one layer at a time keeps the
    other activations.
    """
    inside = BF16 if autocast else FP32
    wide = 4 if model.is_gated else 2
    layer = 4 * FP32 * model.width + inside * (
        4 * model.width + 2 * model.key_width + wide * model.mlp_width
    )
    if adapted:
        layer += inside * (6 * model.width + model.mlp_width)
    if recomputes:
        return tokens * (layer + FP32 * model.width * model.layers)
    return tokens * layer * model.layers


def passing_activations(
    model: ModelSize, tokens: int, *, autocast: bool, adapted: bool = False
) -> int:
    """Return the bytes of the activations of one layer, which the next layer replaces.

    Three tensors of the MLP's width exist at a time. With adapters there are four, because the
    output of the adapter is scaled and then added to the output of the frozen layer.
    """
    inside = BF16 if autocast else FP32
    wide = 4 if adapted else 3
    return tokens * (4 * FP32 * model.width + wide * inside * model.mlp_width)


def attention_weights(model: ModelSize, tokens: int, longest: int, texts: int = 1) -> int:
    """Return bytes of the attention weights that `kernels.attention` keeps in a pass of `tokens`.

    A row has `texts` texts of up to `longest` tokens. The kernel computes blocks of queries, each
    with the keys of its row up to the end of the block. For texts that are too long for the
    kernel, PyTorch computes the attention and keeps no weights. But other batches have shorter
    texts and use the kernel, so `longest` is capped at the longest text that the kernel takes.
    """
    length = texts * min(longest, isqrt(MAX_SCORES))
    keys = min(length, (length + BLOCK) // 2)
    return FP32 * tokens * keys * model.heads * model.layers


def chunk_of_logits(model: ModelSize, tokens: int, *, autocast: bool) -> int:
    """Return bytes of the logits of a chunk of `tokens`; see `ChunkedLMHead`."""
    logits = min(LOGITS_PER_CHUNK, tokens * model.vocabulary)
    return (LOGIT_COPIES if autocast else 1) * FP32 * logits
