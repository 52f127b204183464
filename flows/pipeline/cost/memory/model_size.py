"""Read the sizes of a model from an instance without weights, for `pipeline.cost.memory`."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pipeline.cost.memory.sizes import ModelSize
from ppo_core.config.script_arguments import ALL_LINEAR
from ppo_core.data.text_config import text_config


def model_size(model: PreTrainedModel) -> ModelSize:
    """Return the sizes of a decoder-only or encoder-only model.

    If the layers differ, the numbers of heads and the widths are the largest of all layers.
    """
    config = text_config(model.config)
    heads, key_widths, mlp_widths = zip(*map(_widths, config.per_layer_config), strict=True)
    return ModelSize(
        parameters=model.num_parameters(),
        outside_layers=_outside_layers(model),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        mlp_width=max(mlp_widths),
        is_gated=_is_gated(model),
        heads=max(heads),
        key_width=max(key_widths),
        vocabulary=config.vocab_size,
    )


def _widths(layer: Any) -> tuple[int, int, int]:
    """Return the query heads, the width of a token's keys, and the width of the MLP of a layer.

    A model without attention, such as Mamba, has no heads and no keys.
    """
    heads = getattr(layer, "num_attention_heads", None) or 0
    of_a_head = getattr(layer, "head_dim", None) or layer.hidden_size // max(heads, 1)
    inside = getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size
    return (
        heads,
        (getattr(layer, "num_key_value_heads", None) or heads) * of_a_head,
        # The configuration of Gemma 3n has a list with the width of each layer.
        max(inside) if isinstance(inside, list) else inside,
    )


def _is_gated(model: PreTrainedModel) -> bool:
    """Return whether the MLPs have a gate, such as the layer gate_proj.

    Mixtures of experts have no linear layer for it, but the parameter gate_up_proj of all experts.
    """
    layers = [name for name, _ in _linear_layers(model)]
    experts = [name for name, _ in model.named_parameters() if name.endswith("gate_up_proj")]
    return any("gate" in name.rpartition(".")[2] for name in [*layers, *experts])


def count_adapter_parameters(
    model: PreTrainedModel, rank: int, target_modules: Sequence[str]
) -> int:
    """Return the number of parameters of LoRA adapters.

    The adapter of a linear layer has rank x (inputs + outputs). `target_modules` are the last
    parts of the names of linear layers, or `all-linear` for all linear layers. The output head
    never has an adapter.
    """
    head = model.get_output_embeddings()
    return sum(
        rank * sum(layer.weight.shape)
        for name, layer in _linear_layers(model)
        if layer is not head
        and any(one == ALL_LINEAR or f".{name}".endswith(f".{one}") for one in target_modules)
    )


def _linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        # The linear layers of GPT-2 have a class of their own.
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            yield name, module


def _outside_layers(model: PreTrainedModel) -> int:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = {id(parameter) for each in lists for parameter in each.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in inside)
