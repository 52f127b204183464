"""Log-probabilities of chosen tokens and losses of them, without ever holding all logits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ppo_core.algorithm.kl import full_kl
from ppo_core.algorithm.logits import tempered
from ppo_core.models.kernels.fused_linear_loss import TokenLoss, distribution, fused_loss

LOGITS_PER_CHUNK = 2**23
"""Logits that exist at a time: 32 MiB in fp32."""

ToLogits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ChunkedLMHead:
    """What makes distributions over the next token out of hidden states, a chunk at a time."""

    module: nn.Module
    """Holds the matrix from hidden states to the vocabulary."""

    product: ToLogits
    """Hidden states (n, D) times that matrix: (n, V)."""

    rule: ToLogits | None
    """What a family does with the product, if anything: scales or caps it."""

    temperature: float

    def logits(self, hidden: Tensor) -> Tensor:
        """Tempered logits (n, V) of hidden states (n, D)."""
        return self.of_product(self.product(hidden))

    def of_product(self, product: Tensor) -> Tensor:
        """Tempered logits (n, V) of the matrix's product with hidden states."""
        return tempered(self.rule(product) if self.rule else product, self.temperature)

    def logprobs(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each target, and the entropy of its distribution: (N,), (N,).

        hidden is (N, D), targets (N,) token ids. Gradients flow to hidden and to the head through
        the log-probabilities, by logits that are computed again; the entropy carries none.
        """

        def of_chunk(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.logits(states)
            if not logits.requires_grad:
                said = distribution(logits, chosen)
                return said.logprobs, said.entropies
            logprobs = logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(dim=-1)
            return logprobs, distribution(logits.detach().clone(), chosen).entropies

        parts = [
            checkpoint(of_chunk, hidden[part], targets[part], use_reentrant=False)
            for part in self.chunks(hidden)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def loss(
        self, hidden: Tensor, targets: Tensor, token_loss: TokenLoss
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss of the targets' log-probabilities, these, and entropies: (), (N,), (N,).

        Gradients flow through the loss alone. A loss of each token by itself lets a chunk's
        gradients be computed while its logits exist, so that none are computed twice.
        """
        if any(hasattr(parameter, "ds_id") for parameter in self.module.parameters()):
            # ZeRO-3 holds no whole matrix to differentiate by; its hooks fetch it once more.
            logprobs, entropies = self.logprobs(hidden, targets)
            return token_loss(logprobs, slice(None)).sum(), logprobs.detach(), entropies
        return fused_loss(self, hidden, targets, token_loss)

    def divergence(self, hidden: Tensor, reference: "ChunkedLMHead", ref_hidden: Tensor) -> Tensor:
        """KL(policy || reference) (N,) over the whole vocabulary, for states (N, D) of each.

        The gradient flows into the policy alone, by logits that are computed again.
        """

        def of_chunk(states: Tensor, ref_states: Tensor) -> Tensor:
            with torch.no_grad():
                ref_logits = reference.logits(ref_states)
            return full_kl(self.logits(states), ref_logits)

        parts = [
            checkpoint(of_chunk, hidden[part], ref_hidden[part], use_reentrant=False)
            for part in self.chunks(hidden)
        ]
        return torch.cat(parts)

    def chunks(self, hidden: Tensor) -> Iterator[slice]:
        """Slices of the states, of nearly equal sizes.

        ZeRO-3 fetches the head for each chunk from all processes, so they must all have equally
        many: the most that one needs. In others chunks are smaller then, or empty.
        """
        size = max(1, LOGITS_PER_CHUNK // int(self.module.out_features))  # type: ignore[arg-type]
        number = max(1, -(-len(hidden) // size))
        if any(hasattr(parameter, "ds_id") for parameter in self.module.parameters()):
            most = torch.tensor(number, device=hidden.device)
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
            number = int(most)
        start = 0
        for part in torch.arange(len(hidden)).tensor_split(number):
            yield slice(start, start + len(part))
            start += len(part)
