"""SFT on long texts on a GPU: loss and gradients of the model itself, and linear memory."""

import pytest
import torch

from ppo_core.supervised.examples.sft_examples import collate_examples
from ppo_core.supervised.next_token_loss import NextTokenLoss
from tests.ppo_core.supervised.test_next_token_loss import (
    EXAMPLES,
    assert_same,
    long_example,
    long_model,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def test_the_loss_of_long_texts_is_that_of_each_text_alone():
    model = long_model().cuda()
    weights = torch.tensor([1 / 2048, 0.25])
    assert_same(NextTokenLoss(model), model, [long_example(2048), EXAMPLES[0]], weights)


def peak_bytes(objective: NextTokenLoss, length: int) -> int:
    """Return the memory in bf16 of a forward and backward pass of a text, beyond the weights."""
    batch = {**collate_examples([long_example(length)]), "weights": torch.ones(1)}
    on_gpu = {name: tensor.cuda() for name, tensor in batch.items()}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        loss, _ = objective(**on_gpu)
    loss.backward()
    objective.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def test_the_memory_of_a_long_text_grows_with_its_length():
    objective = NextTokenLoss(long_model().cuda())
    peak_bytes(objective, 64)  # The first pass allocates workspaces of the libraries.
    short, long = peak_bytes(objective, 4096), peak_bytes(objective, 16_384)
    # Attention with a mask would need 4 bytes for each pair of tokens and head: 4 GiB.
    assert long < 4.5 * short
    assert long < 2**29
