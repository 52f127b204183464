"""The LM head, applied in chunks: log-probabilities, entropies and KL divergences of tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ppo_core.algorithm.kl import full_kl
from ppo_core.algorithm.temperature import tempered
from ppo_core.models.kernels.token_distribution import distribution

LOGITS_PER_CHUNK = 2**23
"""Number of logits in memory at a time: 32 MiB in fp32."""

ToLogits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ChunkedLMHead:
    """The LM head at one temperature, applied to a chunk of hidden states at a time."""

    module: nn.Module
    """Module with the weights, (V, D) in a linear layer."""

    matmul: ToLogits
    """Function that maps hidden states (n, D) to the module's output (n, V)."""

    rule: ToLogits | None
    """Function that scales or caps the module's output, as some model families do, or None."""

    temperature: float

    def logits(self, hidden: Tensor) -> Tensor:
        """Return tempered logits (n, V) of hidden states (n, D)."""
        output = self.matmul(hidden)
        return tempered(self.rule(output) if self.rule else output, self.temperature)

    def logprobs(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities (N,) of targets, and entropies (N,) of the distributions.

        hidden is (N, D), and targets (N,) are token ids. Gradients flow through the
        log-probabilities to hidden and to the head. The backward pass computes the logits again.
        Entropies carry no gradient.
        """

        def of_chunk(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.logits(states)
            if not logits.requires_grad:
                made = distribution(logits, chosen)
                return made.logprobs, made.entropies
            logprobs = logits.gather(1, chosen[:, None])[:, 0] - logits.logsumexp(dim=-1)
            return logprobs, distribution(logits.detach().clone(), chosen).entropies

        parts = [
            checkpoint(of_chunk, hidden[part], targets[part], use_reentrant=False)
            for part in self.chunks(hidden)
        ]
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def divergence(self, hidden: Tensor, reference: "ChunkedLMHead", ref_hidden: Tensor) -> Tensor:
        """Return KL(policy || reference) (N,) over the vocabulary.

        `hidden` and `ref_hidden` are the hidden states (N, D) of policy and reference. Gradients
        flow only into the policy, and the backward pass computes the logits again.
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
        """Yield slices of nearly equal sizes that cover hidden states (N, D).

        Under ZeRO-3 all processes gather the head for each chunk, so all use the same number of
        chunks: the largest number that any process needs. Processes with fewer states have smaller
        or empty chunks.
        """
        size = max(1, LOGITS_PER_CHUNK // int(self.module.out_features))  # type: ignore[arg-type]
        number = max(1, -(-len(hidden) // size))
        if self.is_sharded():
            maximum = torch.tensor(number, device=hidden.device)
            torch.distributed.all_reduce(maximum, torch.distributed.ReduceOp.MAX)
            number = int(maximum)
        start = 0
        for part in torch.arange(len(hidden)).tensor_split(number):
            yield slice(start, start + len(part))
            start += len(part)

    def is_sharded(self) -> bool:
        """Return whether ZeRO-3 shards the weights."""
        return any(hasattr(parameter, "ds_id") for parameter in self.module.parameters())
