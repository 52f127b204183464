"""Forward pass of pairs of sequences with a common start, which is computed only once.

A pair becomes one row: the first sequence, and then the second without the common start.

    common | rest of the first | rest of the second

The rest of the second sequence does not attend to the rest of the first, and its positions follow
the positions of the common start. So a row has the same hidden states as the two sequences.
"""

import torch
from torch import Tensor

from ppo_core.models.kernels.attention import Masking, causal_mask
from ppo_core.models.kernels.decoder_families import DecoderLayers
from ppo_core.models.kernels.decoder_forward import FullSequences, Selection, forward


class BranchedPairs(FullSequences):
    """Pairs arranged as rows; `ids` (B, R) are the token ids of the rows."""

    masking = Masking.BRANCHED

    def __init__(self, pairs: Tensor, lengths: Tensor) -> None:
        """Take right-padded token ids (B, 2, S), and the lengths (B, 2), at least 1."""
        first = lengths[:, :1]
        alike = (pairs[:, 0] == pairs[:, 1]).long().cumprod(dim=1).sum(dim=1, keepdim=True)
        # The common start never contains a sequence's last token, because its state is read.
        common = torch.minimum(alike, lengths.amin(dim=1, keepdim=True) - 1)
        self.lengths = lengths.sum(dim=1) - common[:, 0]
        column = torch.arange(int(self.lengths.max()), device=pairs.device)
        is_second = column >= first
        # Padding at the end of a row has the last position.
        after = (column - first + common).clamp(max=pairs.shape[2] - 1)
        self.positions = torch.where(is_second, after, column)
        row = torch.arange(len(pairs), device=pairs.device)[:, None]
        self.ids = pairs[row, is_second.long(), self.positions]
        is_first_rest = (column >= common) & ~is_second
        hidden = is_second[:, :, None] & is_first_rest[:, None, :]
        self.mask = causal_mask(len(column), pairs.device).masked_fill(hidden, -torch.inf)


def last_states(decoder: DecoderLayers, pairs: Tensor, lengths: Tensor) -> Tensor:
    """Return hidden states (2B, D) at the last tokens of right-padded pairs (B, 2, S)."""
    context = BranchedPairs(pairs, lengths)
    row = torch.arange(len(pairs), device=pairs.device).repeat_interleave(2)
    last = torch.stack([lengths[:, 0], context.lengths], dim=1).flatten() - 1
    return forward(decoder, context.ids, context, Selection(row, last))
