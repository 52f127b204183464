"""Interpolate between the weights of two policies, or extrapolate beyond the second."""

from pathlib import Path

import torch

from ppo_core.algorithm.temperature import at_least_fp32
from ppo_core.data.model_files import replaced_together, save_tokenizer
from ppo_core.errors import ModelError
from ppo_core.models.loading import load_policy, load_tokenizer


@torch.no_grad()
def write_interpolated(start: str | Path, end: str | Path, weight: float, folder: Path) -> None:
    """Write the policy start + weight * (end - start) with the tokenizer of `end`.

    If `weight` is lowered, the divergence from the start falls faster than the reward (WARP,
    arXiv:2406.16768, section 3.3). A `weight` above 1 goes further in the direction of the training
    (ExPO, arXiv:2404.16792). The weights are computed in fp32 or higher, and saved in the precision
    of `end`.

    Args:
        start: folder or hub id of a causal language model.
        end: folder of a model with the same parameters.
        weight: 0 is the start, 1 is the end; not negative.
        folder: folder for the policy; it is written completely or not at all.

    Raises:
        ModelError: a model cannot be loaded, or the parameters of the models differ.
        TrainingError: a file cannot be written, for example because the disk is full.
    """
    model = load_policy(end, dtype="auto")
    begun = dict(load_policy(start, dtype="auto").named_parameters())
    ended = dict(model.named_parameters())
    shapes = [{name: weights.shape for name, weights in part.items()} for part in (begun, ended)]
    if shapes[0] != shapes[1]:
        names = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
        raise ModelError(
            f"The parameters of '{start}' and '{end}' differ, for example {names[0]}, so they "
            f"cannot be interpolated. Use '{end}' as it is."
        )
    for name, weights in ended.items():
        target = at_least_fp32(weights)
        weights.copy_(torch.lerp(begun[name].to(target.dtype), target, weight))
    with replaced_together(folder) as unfinished:
        model.save_pretrained(unfinished)
        save_tokenizer(load_tokenizer(end), unfinished)
