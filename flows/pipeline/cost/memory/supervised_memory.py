"""Compute the memory of supervised fine-tuning, and of the training of a reward model."""

from dataclasses import dataclass

from pipeline.cost.memory.sizes import (
    BF16,
    FP32,
    PROCESS,
    Memory,
    ModelSize,
    Shards,
    attention_weights,
    chunk_of_logits,
    kept_activations,
    largest,
)


@dataclass(frozen=True, kw_only=True)
class SupervisedSize(Shards):
    """Model and batches of a supervised training."""

    model: ModelSize
    """The language model, or the classifier that is trained on pairs."""

    writes: bool
    """Whether the model has an LM head (SFT), not a score head (reward model)."""

    adapter: int = 0
    """Number of parameters of the adapter; 0 if the model itself is trained."""

    autocast: bool = False
    """Whether passes compute in bfloat16 (`bf16`)."""

    recomputes: bool = False
    """Whether the backward pass recomputes activations (`gradient_checkpointing`)."""

    tokens: int
    """Tokens in a forward and backward pass of a process, including padding and both texts of a
    pair."""

    longest: int = 0
    """Tokens of the longest text."""

    texts: int = 1
    """Texts of a row: 1, or 2 for a pair."""

    on_cpu: bool = False
    """Whether the processes compute on the CPU. If so, the passes, the loading of models and the
    copies of checkpoints all use the main memory."""

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        return self.adapter or self.model.parameters


def peak_supervised_memory(size: SupervisedSize) -> Memory:
    """Return the memory of the phase of a supervised training that needs the most memory."""
    return largest(supervised_phases(size))


def supervised_phases(size: SupervisedSize) -> list[Memory]:
    """Return the memory in each phase: a step, and on a CPU also loading and saving.

    A frozen base is loaded in fp32. For saving, the base is loaded again, and the adapter is merged
    into it.
    """
    frozen = FP32 * size.model.parameters if size.adapter else 0
    loaded = FP32 * size.trained + frozen
    full = FP32 * size.trained + (_kept_base(size) if size.adapter else 0)
    process = PROCESS if size.on_cpu else 0
    buffers, optimizer = size.send_buffers(size.trained), size.optimizer(size.trained)
    step = Memory(
        phase="step",
        weights=size.weights(full),
        gradients=size.gradients(size.trained) + buffers,
        optimizer=optimizer,
        activations=_activations(size) + size.whole_layers([size.model], FP32),
        process=process,
    )
    if not size.on_cpu:
        return [step]
    loading = Memory(
        phase="loading", weights=loaded, gradients=0, optimizer=0, activations=0, process=process
    )
    saving = Memory(
        phase="saving",
        weights=size.weights(full) + frozen,
        gradients=buffers,
        optimizer=optimizer,
        activations=0,
        copies=FP32 * size.trained + 2 * FP32 * size.trained // size.processes,
        process=process,
    )
    return [step, loading, saving]


def _kept_base(size: SupervisedSize) -> int:
    """Bytes of a frozen base: its layers are in bfloat16 if `keep_frozen_in_bf16` rounds them."""
    outside = size.model.outside_layers
    in_bf16 = size.autocast and not size.shards_weights
    return FP32 * outside + (BF16 if in_bf16 else FP32) * (size.model.parameters - outside)


def _activations(size: SupervisedSize) -> int:
    """Bytes of activations, bfloat16 copies of weights, and the head's gradient and logits."""
    kept = kept_activations(
        size.model,
        size.tokens,
        autocast=size.autocast,
        recomputes=size.recomputes,
        adapted=bool(size.adapter),
    )
    if size.on_cpu and not (size.shards_weights or size.recomputes):
        kept += attention_weights(size.model, size.tokens, size.longest, size.texts)
    if size.writes:
        if not (size.adapter or size.shards_weights):
            kept += FP32 * size.model.width * size.model.vocabulary  # gradient of the head
        kept += chunk_of_logits(size.model, size.tokens, autocast=size.autocast)
    return kept + (BF16 * size.trained if size.autocast else 0)
