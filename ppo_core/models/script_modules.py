"""Reward and value models that a script defines itself, called as TRL calls them."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.algorithm.masking import length_mask
from ppo_core.algorithm.temperature import at_least_fp32
from ppo_core.data.types import TokenRows
from ppo_core.errors import ModelError


def has_backbone_and_score(module: nn.Module) -> bool:
    """Return whether a module names its backbone in `base_model_prefix`, and has a `score`.

    TRL computes such a module's outputs as score(hidden states of the backbone).
    """
    prefix = getattr(module, "base_model_prefix", None)
    return isinstance(prefix, str) and hasattr(module, prefix) and hasattr(module, "score")


def has_own_score(module: nn.Module) -> bool:
    """Return whether a module has a backbone and a `score` that is not a linear layer."""
    return has_backbone_and_score(module) and not isinstance(module.score, nn.Linear)


@torch.no_grad()
def score_rows(module: nn.Module, ids: Tensor, lengths: Tensor) -> Tensor:
    """Return scores (B,) of right-padded token ids (B, S) of the given lengths (B,).

    A module with a backbone and a `score` scores each sequence at its last token. For any other
    module, `module(input_ids, attention_mask)` must return the scores, (B,) or (B, 1).

    Raises:
        ModelError: the module returns another shape.
    """
    mask = length_mask(lengths, ids.shape[1])
    if has_backbone_and_score(module):
        rows = torch.arange(len(ids), device=ids.device)
        return at_least_fp32(token_scores(module, ids, mask)[rows, lengths - 1, 0])
    scores = _tensor(_call(module, ids, mask))
    if scores.shape not in ((len(ids),), (len(ids), 1)):
        raise ModelError(
            f"The reward model {type(module).__name__} returned scores of shape "
            f"{tuple(scores.shape)} for {len(ids)} responses. Return one score for each response, "
            f"(B,) or (B, 1)."
        )
    return at_least_fp32(scores.reshape(-1))


def hidden_states(backbone: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the last hidden states (B, S, D) of a script's backbone."""
    output = _call(backbone, ids, mask, output_hidden_states=True, return_dict=True)
    states: Tensor = (
        output.hidden_states[-1]
        if getattr(output, "hidden_states", None) is not None
        else output.last_hidden_state
    )
    return states


def token_values(module: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the values (B, S, 1) of a module that returns one value for each token.

    Raises:
        ModelError: the module returns another shape than (B, S) or (B, S, 1).
    """
    return _of_each_token(_tensor(_call(module, ids, mask)), module, "", ids)


def token_scores(module: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Return scores (B, S, 1) of all tokens by a module that has a backbone and a `score`.

    `score` may be a layer or a method. As in TRL, it is called with the states of all tokens.

    Raises:
        ModelError: `score` returns another shape than (B, S) or (B, S, 1).
    """
    model: Any = module
    states = hidden_states(getattr(model, model.base_model_prefix), ids, mask)
    if isinstance(model.score, nn.Module):
        states = states.to(next(model.score.parameters(), states).dtype)
    return _of_each_token(model.score(states), module, ".score", ids)


def is_pointwise(score: object) -> bool:
    """Return whether `score` is known to compute each token's score from its state alone."""
    kinds = (nn.Linear, nn.Sequential, nn.LayerNorm, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh)
    return isinstance(score, nn.Module) and all(type(one) in kinds for one in score.modules())


def _of_each_token(values: Tensor, module: nn.Module, part: str, ids: Tensor) -> Tensor:
    if values.shape not in (ids.shape, (*ids.shape, 1)):
        raise ModelError(
            f"The model {type(module).__name__}{part} returned values of shape "
            f"{tuple(values.shape)} for token ids {tuple(ids.shape)}. Return one value for each "
            "token, (B, S) or (B, S, 1)."
        )
    return values.reshape(*ids.shape, 1)


class ModuleBackbone:
    """A script's module, used as a backbone."""

    def __init__(
        self, module: nn.Module, read: Callable[[nn.Module, Tensor, Tensor], Tensor]
    ) -> None:
        """Take a module, and a function from module, token ids and mask to states (B, S, D).

        The function is `hidden_states`, `token_values` or `token_scores`.
        """
        self.module = module
        self._read = read

    def states(self, rows: TokenRows) -> Tensor:
        """Return the states (N, D) from which the counted tokens were sampled."""
        mask = length_mask(rows.lengths, rows.ids.shape[1])
        return self._read(self.module, rows.ids, mask)[rows.row, rows.state]

    def products(self, ids: Tensor) -> AbstractContextManager[None]:
        """Return a context without effect: the matmul backend is not changed."""
        return nullcontext()


def _call(module: nn.Module, ids: Tensor, mask: Tensor, **options: Any) -> Any:
    """Call a module with the inputs that it takes, by position if it takes no `input_ids`."""
    inputs = {"input_ids": ids, "attention_mask": mask.long(), **options}
    taken = inspect.signature(module.forward).parameters
    takes_any = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in taken.values())
    if not takes_any and "input_ids" not in taken:
        return module(*[ids, mask.long()][: len(taken)])
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    named = {"position_ids": positions, "use_cache": False}
    inputs |= {name: value for name, value in named.items() if name in taken}
    if not takes_any:
        inputs = {name: value for name, value in inputs.items() if name in taken}
    return module(**inputs)


def _tensor(output: Any) -> Tensor:
    """Return the tensor of an output: its `logits`, its first entry, or the output itself."""
    found = getattr(output, "logits", None)
    if found is None:
        found = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(found, Tensor):
        raise ModelError(
            f"A reward or value model returned a {type(output).__name__}. Return a tensor, or an "
            "output of transformers with `logits`."
        )
    return found
