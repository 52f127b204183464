"""Pairs with a common start, computed once, against each sequence alone."""

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModel

from ppo_core.models.backbones import DecoderBackbone
from ppo_core.models.kernels.branched_pairs import BranchedPairs
from tests.ppo_core.models.kernels.test_decoder_forward import PLAIN

LENGTHS = torch.tensor([[9, 20], [33, 33], [1, 5], [30, 2], [33, 33]])


def make_pairs() -> torch.Tensor:
    """Return pairs (5, 2, 33) that begin alike, differ from the start, or are wholly alike."""
    pairs = torch.randint(1, 20, (5, 2, 33), generator=torch.Generator().manual_seed(1))
    pairs[:2, 1, :8] = pairs[:2, 0, :8]
    pairs[3:, 1] = pairs[3:, 0]
    return pairs


@pytest.mark.parametrize("name", PLAIN)
def test_states_and_gradients_equal_those_of_each_sequence_alone(name):
    torch.manual_seed(0)
    model, pairs = AutoModel.from_config(PLAIN[name]).eval().double(), make_pairs()
    backbone = DecoderBackbone(model)
    assert backbone.fast_layers() is not None
    together = backbone.last_states(pairs, LENGTHS)
    together.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    alone = torch.stack(
        [
            model(input_ids=ids[None, :length]).last_hidden_state[0, -1]
            for ids, length in zip(pairs.flatten(0, 1), LENGTHS.flatten().tolist(), strict=True)
        ]
    )
    alone.square().sum().backward()
    # transformers computes rotary angles in fp32.
    assert_close(together, alone, rtol=0, atol=1e-5)
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-4)


def test_a_row_has_the_common_start_once():
    # The common start is 5 6; the rests are 7 and 8 9.
    context = BranchedPairs(torch.tensor([[[5, 6, 7, 0], [5, 6, 8, 9]]]), torch.tensor([[3, 4]]))
    assert context.ids.tolist() == [[5, 6, 7, 8, 9]]
    assert context.positions.tolist() == [[0, 1, 2, 2, 3]]
    visible = (context.mask[0] == 0).int().tolist()
    assert visible[2:] == [[1, 1, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
