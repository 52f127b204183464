"""Check whether `decoder_forward`, the fast path, supports a backbone; return its modules.

The modules are the backbone's own, with their weights, adapters and settings. This file describes
how each model family of transformers connects its modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Model
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from ppo_core.models.kernels.hooks import is_hooked

QueriesKeysValues = tuple[Tensor, Tensor, Tensor]
"""Queries (B, S, H, E), keys and values (B, S, G, E)."""


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """A pre-norm layer: attention and an MLP, each added to the residual stream."""

    attention_norm: nn.Module
    project: Callable[[Tensor], QueriesKeysValues]
    """Maps normed states (B, S, D) to queries, keys and values."""

    output: nn.Module
    """Output projection of attention, from (..., H * E) to (..., D)."""

    mlp_norm: nn.Module
    mlp: nn.Module
    scale: float
    """Factor of the scores `queries @ keys.T`."""

    is_parallel: bool = False
    """Whether the MLP reads the layer's input, without the attention output added to it."""

    def finish(self, states: Tensor, attention_output: Tensor) -> Tensor:
        """Return the layer's output (..., D).

        `states` (..., D) is the layer's input. `attention_output` (..., H * E) has the weighted
        values of all heads, before the output projection.
        """
        attended = self.output(attention_output)
        if self.is_parallel:
            return self.mlp(self.mlp_norm(states)) + attended + states
        states = attended + states
        return self.mlp(self.mlp_norm(states)) + states


@dataclass(frozen=True, kw_only=True)
class DecoderLayers:
    """The modules of a decoder-only backbone."""

    token_embedding: nn.Module
    """Maps token ids (B, S) to embeddings (B, S, D)."""

    position_embedding: nn.Module | None = None
    """Maps positions (B or 1, S) to embeddings, added to the token embeddings; None if unused."""

    rotary: nn.Module | None = None
    """Maps states and positions to cosine and sine (B or 1, S, R) of angles; None if unused."""

    layers: Sequence[DecoderLayer]
    norm: nn.Module


def fast_path(backbone: nn.Module) -> DecoderLayers | None:
    """Return the modules of a backbone, or None if the fast path cannot compute it now.

    If None is returned, the caller must call the backbone's own forward. The cases are:

    - the model family, or this variant of the family, is not known here;
    - the backbone is in training mode, which may use dropout and recomputed activations;
    - the embeddings are in half precision on a CPU, or weights have fewer bits: the fast path sums
      in another order than transformers, so rounding could lead to other tokens than in the library
      that serves the model. On a GPU, half precision is accepted, because captured steps save much
      time;
    - attention is not transformers' default: another `attn_implementation` was chosen, or
      another function was registered under the default's name;
    - a module has a hook or a replaced `forward`, as under FSDP2 and ZeRO-3, which gather weights
      by hooks.
    """
    family = _FAMILIES.get(type(backbone))
    if family is None or backbone.training or not _has_enough_bits(backbone):
        return None
    if not _has_default_attention(backbone) or any(map(is_hooked, backbone.modules())):
        return None
    blocks = list(getattr(backbone, family.blocks))
    replaced = [backbone, *blocks, *(getattr(block, family.attention) for block in blocks)]
    if not all(_is_of_family(module, type(backbone)) for module in replaced):
        return None
    return family.read(backbone)


def _has_enough_bits(backbone: nn.Module) -> bool:
    first = next(backbone.parameters())
    # If the embeddings are in fp32, autocast chooses the precision of matrices in half precision.
    if first.itemsize < 4 and not first.is_cuda:
        return False
    return all(parameter.itemsize >= 2 for parameter in backbone.parameters())


def _has_default_attention(backbone: Any) -> bool:
    # The configuration has "sdpa" by default, and also if the user chose it.
    return (
        backbone.config._attn_implementation == "sdpa"
        and ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward
        and ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask
    )


def _is_of_family(module: nn.Module, family: type[nn.Module]) -> bool:
    """Return whether a module has the family's own `forward`, which the fast path replaces."""
    cls = type(module)
    return cls.__module__ == cls.forward.__module__ == family.__module__


def _gpt_neox(backbone: Any) -> DecoderLayers:
    return DecoderLayers(
        token_embedding=backbone.embed_in,
        rotary=backbone.rotary_emb,
        layers=[_gpt_neox_layer(layer) for layer in backbone.layers],
        norm=backbone.final_layer_norm,
    )


def _gpt_neox_layer(layer: GPTNeoXLayer) -> DecoderLayer:
    attention = layer.attention
    size = attention.head_size

    def project(normed: Tensor) -> QueriesKeysValues:
        fused = attention.query_key_value(normed)
        return fused.view(*normed.shape[:2], -1, 3, size).unbind(3)

    return DecoderLayer(
        attention_norm=layer.input_layernorm,
        project=project,
        output=attention.dense,
        mlp_norm=layer.post_attention_layernorm,
        mlp=layer.mlp,
        scale=attention.scaling,
        is_parallel=layer.use_parallel_residual,
    )


def _llama(backbone: Any) -> DecoderLayers | None:
    """Return the modules of Llama or Qwen2; None if a layer has sliding-window attention."""
    kinds = getattr(backbone.config, "layer_types", None) or ["full_attention"]
    if set(kinds) != {"full_attention"}:
        return None
    return DecoderLayers(
        token_embedding=backbone.embed_tokens,
        rotary=backbone.rotary_emb,
        layers=[_llama_layer(layer) for layer in backbone.layers],
        norm=backbone.norm,
    )


def _llama_layer(layer: Any) -> DecoderLayer:
    attention = layer.self_attn

    def project(normed: Tensor) -> QueriesKeysValues:
        shape = *normed.shape[:2], -1, attention.head_dim
        return (
            attention.q_proj(normed).view(shape),
            attention.k_proj(normed).view(shape),
            attention.v_proj(normed).view(shape),
        )

    return DecoderLayer(
        attention_norm=layer.input_layernorm,
        project=project,
        output=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm,
        mlp=layer.mlp,
        scale=attention.scaling,
    )


def _gpt2(backbone: Any) -> DecoderLayers | None:
    if backbone.config.add_cross_attention:
        return None
    return DecoderLayers(
        token_embedding=backbone.wte,
        position_embedding=backbone.wpe,
        layers=[_gpt2_layer(block) for block in backbone.h],
        norm=backbone.ln_f,
    )


def _gpt2_layer(block: GPT2Block) -> DecoderLayer:
    attention = block.attn

    def project(normed: Tensor) -> QueriesKeysValues:
        fused = attention.c_attn(normed)
        shape = *normed.shape[:2], 3, -1, attention.head_dim
        return fused.view(shape).unbind(2)

    return DecoderLayer(
        attention_norm=block.ln_1,
        project=project,
        output=attention.c_proj,
        mlp_norm=block.ln_2,
        mlp=block.mlp,
        scale=attention.scaling,
    )


class _Family(NamedTuple):
    blocks: str
    """Attribute of a backbone that holds its layers."""

    attention: str
    """Attribute of a layer that holds its attention."""

    read: Callable[[Any], DecoderLayers | None]


_FAMILIES: dict[type[nn.Module], _Family] = {
    GPTNeoXModel: _Family("layers", "attention", _gpt_neox),
    LlamaModel: _Family("layers", "self_attn", _llama),
    Qwen2Model: _Family("layers", "self_attn", _llama),
    GPT2Model: _Family("h", "attn", _gpt2),
}
