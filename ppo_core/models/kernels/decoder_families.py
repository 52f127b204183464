"""The layers of decoder families that `plain_decoder` passes through by itself.

Each part stays the module of transformers that it is, with its weights, adapters and settings; what
is read here is only how a layer puts them together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Model
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

OfHeads = tuple[Tensor, Tensor, Tensor]
"""Queries (B, S, H, E), keys and values (B, S, G, E)."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A decoder layer: attention and a network, each behind a norm, added to what comes in."""

    attention_norm: nn.Module
    project: Callable[[Tensor], OfHeads]
    """Normed states (B, S, D) to queries, keys and values."""

    output: nn.Module
    """Weighted values (..., H * E) to what attention adds (..., D)."""

    mlp_norm: nn.Module
    mlp: nn.Module
    scale: float
    """Of the products of queries and keys."""

    is_parallel: bool = False
    """Whether the network reads what came in, and not what attention made of it."""

    def finish(self, states: Tensor, mixed: Tensor) -> Tensor:
        """States (..., D) behind the layer, for the weighted values (..., H * E) of attention."""
        attended = self.output(mixed)
        if self.is_parallel:
            return self.mlp(self.mlp_norm(states)) + attended + states
        states = attended + states
        return self.mlp(self.mlp_norm(states)) + states


@dataclass(frozen=True, kw_only=True)
class Layers:
    """A backbone in its parts."""

    tokens: nn.Module
    """Token ids to their embeddings."""

    places: nn.Module | None = None
    """Places to embeddings of them, added to those of the tokens."""

    rotary: nn.Module | None = None
    """States and places to cosine and sine (B, S, R) each."""

    layers: Sequence[Layer]
    norm: nn.Module


def plain_layers(backbone: nn.Module) -> Layers | None:
    """The parts of a backbone as it is now, or None if it must be called as a whole.

    That is so for a family or a variant that is not known here; in training mode, which has
    dropout and recomputed activations; for weights in half precision, where another order of sums
    makes other tokens than whoever serves the model will see; and where something hangs on a
    forward pass that would be left out, as FSDP2 and ZeRO-3 do to fetch the weights of a layer.
    """
    family = _FAMILIES.get(type(backbone))
    if family is None or backbone.training or next(backbone.parameters()).dtype.itemsize < 4:
        return None
    blocks, attention = family.blocks, family.attention
    passed_by = [backbone]
    for block in getattr(backbone, blocks):
        passed_by += [block, getattr(block, attention)]
    if any(_is_changed(module, type(backbone)) for module in passed_by):
        return None
    return family.read(backbone)


def _is_changed(module: nn.Module, family: type[nn.Module]) -> bool:
    """Whether a call of the module does anything but what the family's own forward does."""
    return bool(
        type(module).__module__ != family.__module__
        or module._forward_hooks
        or module._forward_pre_hooks
        or "forward" in vars(module)
    )


def _gpt_neox(backbone: Any) -> Layers:
    return Layers(
        tokens=backbone.embed_in,
        rotary=backbone.rotary_emb,
        layers=[_gpt_neox_layer(layer) for layer in backbone.layers],
        norm=backbone.final_layer_norm,
    )


def _gpt_neox_layer(layer: GPTNeoXLayer) -> Layer:
    attention = layer.attention
    size = attention.head_size

    def project(normed: Tensor) -> OfHeads:
        joined = attention.query_key_value(normed)
        return joined.view(*normed.shape[:2], -1, 3, size).unbind(3)

    return Layer(
        attention_norm=layer.input_layernorm,
        project=project,
        output=attention.dense,
        mlp_norm=layer.post_attention_layernorm,
        mlp=layer.mlp,
        scale=attention.scaling,
        is_parallel=layer.use_parallel_residual,
    )


def _llama(backbone: Any) -> Layers | None:
    """Llama, and Qwen2 where no layer looks back over a part of its row alone."""
    kinds = getattr(backbone.config, "layer_types", None) or ["full_attention"]
    if set(kinds) != {"full_attention"}:
        return None
    return Layers(
        tokens=backbone.embed_tokens,
        rotary=backbone.rotary_emb,
        layers=[_llama_layer(layer) for layer in backbone.layers],
        norm=backbone.norm,
    )


def _llama_layer(layer: Any) -> Layer:
    attention = layer.self_attn

    def project(normed: Tensor) -> OfHeads:
        shape = *normed.shape[:2], -1, attention.head_dim
        return (
            attention.q_proj(normed).view(shape),
            attention.k_proj(normed).view(shape),
            attention.v_proj(normed).view(shape),
        )

    return Layer(
        attention_norm=layer.input_layernorm,
        project=project,
        output=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm,
        mlp=layer.mlp,
        scale=attention.scaling,
    )


def _gpt2(backbone: Any) -> Layers | None:
    if backbone.config.add_cross_attention:
        return None
    return Layers(
        tokens=backbone.wte,
        places=backbone.wpe,
        layers=[_gpt2_layer(block) for block in backbone.h],
        norm=backbone.ln_f,
    )


def _gpt2_layer(block: GPT2Block) -> Layer:
    attention = block.attn

    def project(normed: Tensor) -> OfHeads:
        joined = attention.c_attn(normed)
        shape = *normed.shape[:2], 3, -1, attention.head_dim
        return joined.view(shape).unbind(2)

    return Layer(
        attention_norm=block.ln_1,
        project=project,
        output=attention.c_proj,
        mlp_norm=block.ln_2,
        mlp=block.mlp,
        scale=attention.scaling,
    )


class _Family(NamedTuple):
    blocks: str
    """Where a backbone has its layers."""

    attention: str
    """Where a layer has its attention."""

    read: Callable[[Any], Layers | None]


_FAMILIES: dict[type[nn.Module], _Family] = {
    GPTNeoXModel: _Family("layers", "attention", _gpt_neox),
    LlamaModel: _Family("layers", "self_attn", _llama),
    Qwen2Model: _Family("layers", "self_attn", _llama),
    GPT2Model: _Family("h", "attn", _gpt2),
}
