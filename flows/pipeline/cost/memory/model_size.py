"""Read the sizes of a model, for `pipeline.cost.memory`, from a model without weights."""

from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

from pipeline.cost.memory.sizes import ModelSize
from ppo_core.config.script_arguments import ALL_LINEAR
from ppo_core.data.text_config import text_config


def model_size(model: PreTrainedModel) -> ModelSize:
    """Return the sizes of a decoder-only or encoder-only model."""
    config = text_config(model.config)
    heads = config.num_attention_heads
    of_a_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    names = [name for name, _ in _linear_layers(model)]
    return ModelSize(
        parameters=model.num_parameters(),
        outside_layers=_outside_layers(model),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        mlp_width=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        is_gated=any("gate" in name.rpartition(".")[2] for name in names),
        heads=heads,
        key_width=(getattr(config, "num_key_value_heads", None) or heads) * of_a_head,
        vocabulary=config.vocab_size,
    )


def count_adapter_parameters(
    model: PreTrainedModel, rank: int, target_modules: Sequence[str]
) -> int:
    """Return the number of parameters of LoRA adapters.

    Each adapted linear layer has rank x (inputs + outputs) of them. `target_modules` are names of
    linear layers, or `all-linear` for all linear layers. The output head never has an adapter.
    """
    head = model.get_output_embeddings()
    return sum(
        rank * sum(layer.weight.shape)
        for name, layer in _linear_layers(model)
        if layer is not head
        and (ALL_LINEAR in target_modules or name.rpartition(".")[2] in target_modules)
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
