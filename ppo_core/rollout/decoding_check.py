"""Choose the backend that decodes a policy: compare each with the model's own forward pass."""

import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ppo_core.data.prompts import Tokens, context_length
from ppo_core.data.text_config import text_config
from ppo_core.errors import ModelError, library_errors
from ppo_core.models.backbones import DecoderBackbone, Decoding
from ppo_core.models.policy import LanguageModel
from ppo_core.rollout.decoder import Decoder, can_add_prompts, new_decoder
from ppo_core.rollout.kv_cache import own_windows

CHECKED_LENGTHS = (6, 13, 9)
"""Number of tokens of each compared sequence, if no window needs more."""

SAMPLED = 4
"""Number of last tokens of each sequence that are decoded one by one, if no window needs more."""

CLEARLY_BELOW = 10
"""In fp32, the fastest backend whose difference is this many times below the limit is used. If no
backend is that accurate, the most accurate backend within the limit is used."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodingCheck:
    """The backend that decodes a policy, and why it was chosen."""

    kind: Decoding
    difference: float
    """Difference of log-probabilities from the model's own forward pass; see `difference_of`."""

    rejected: tuple[str, ...] = ()
    """For each other backend that was tried: its name, and why it was not chosen."""

    def __str__(self) -> str:
        """Return one sentence for the log."""
        because = f" Not used: {'; '.join(self.rejected)}." if self.rejected else ""
        return (
            f"Responses are decoded by {self.kind.value}: its log-probabilities differ by "
            f"{self.difference:.1e} from the model's own forward pass.{because}"
        )


@dataclass(frozen=True)
class OwnForward:
    """Log-probabilities by the policy's own forward pass, one sequence at a time."""

    sequences: list[Tokens]
    logprobs: list[Tensor]
    """Log-probabilities (S, V) after each token of each sequence."""

    sampled: int
    """Number of last tokens of each sequence that are to be decoded one by one."""

    @classmethod
    def of(cls, policy: LanguageModel, prompts: Sequence[Tokens]) -> "OwnForward":
        """Return the log-probabilities of three sequences of different lengths.

        The tokens are taken from the prompts. If the policy has a pad token, one sequence contains
        this token, because some models derive positions from pad tokens.
        """
        sampled = _tokens_to_decode(policy.model.config)
        sequences = sequences_of(prompts, policy.model.config, further=sampled - SAMPLED)
        if policy.pad_token is not None:
            sequences[1][-sampled] = policy.pad_token
        return cls(sequences, [own_logprobs(policy, tokens) for tokens in sequences], sampled)


def choose_backend(policy: LanguageModel, own: OwnForward) -> DecodingCheck:
    """Choose the fastest backend that reproduces the log-probabilities in `own`.

    A backend that pads prompts decodes the sequences of `own` together. The choice is stored in the
    policy's backbone, and logged.

    Raises:
        ModelError: no backend reproduces the model's own log-probabilities.
    """
    backbone, name = policy.backbone, type(policy.model).__name__
    assert isinstance(backbone, DecoderBackbone)
    limit = limit_of(policy.model)
    found: dict[Decoding, float] = {}
    reasons: dict[Decoding, str] = {}
    with torch.no_grad(), torch.autocast(policy.device.type, enabled=False):
        for kind in _candidates(backbone):
            backbone.fastest = kind
            try:
                with library_errors(ModelError, f"{name} fails", ""):
                    difference = _decoded_difference(policy, backbone, own)
            except ModelError as error:
                reasons[kind] = f"{kind.value} ({str(error).strip()})"
                continue
            found[kind] = math.inf if math.isnan(difference) else difference
            reasons[kind] = f"{kind.value} (difference {found[kind]:.2g})"
            if found[kind] <= limit / (1 if has_low_precision(policy.model) else CLEARLY_BELOW):
                break
        best = min(found, key=lambda each: found[each], default=None)
        if best is None or found[best] > limit:
            _require_causal(policy, own, limit)
    if best is None or found[best] > limit:
        raise ModelError(
            f"{name} (model type {policy.model.config.model_type}) cannot be trained: no decoding "
            "backend reproduces the log-probabilities of its forward pass. Tried: "
            f"{'; '.join(reasons.values())}. Limit: {limit:.0e}. Use another model."
        )
    backbone.fastest = best
    backbone.is_checked = True
    rejected = tuple(reason for kind, reason in reasons.items() if kind is not best)
    check = DecodingCheck(best, found[best], rejected)
    logger.info("%s", check)
    return check


def _tokens_to_decode(config: Any) -> int:
    """Return how many tokens of each checked sequence are decoded one by one.

    A model type may define its own kind of cache layer (Unlimited-OCR's layer forgets tokens of the
    response, but not of the prompt). The check then decodes more tokens than the layer's window
    can hold, if the model's context is long enough.
    """
    context = context_length(config) or math.inf
    past_window = [window + 2 for window in own_windows(text_config(config))]
    allowed = [each for each in past_window if each - SAMPLED <= context - max(CHECKED_LENGTHS)]
    return max([SAMPLED, *allowed])


def sequences_of(
    prompts: Sequence[Tokens], *configs: Any, vocabulary: int | None = None, further: int = 0
) -> list[Tokens]:
    """Return sequences of `CHECKED_LENGTHS` + `further` tokens, taken from the prompts.

    If the prompts have too few tokens, the tokens are repeated. No sequence is longer than the
    shortest context of the models with these `configs`. With a `vocabulary`, only token ids below
    this number are taken; if there are none, the ids 0 and 1 are used.
    """
    size = sum(CHECKED_LENGTHS)
    tokens = list(itertools.islice(itertools.chain.from_iterable(prompts), size))
    tokens = [token for token in tokens if vocabulary is None or token < vocabulary] or [0, 1]
    repeated = itertools.cycle(tokens)
    contexts = [context_length(config) or sys.maxsize for config in configs]
    longest = min(contexts, default=sys.maxsize)
    return [list(itertools.islice(repeated, min(n + further, longest))) for n in CHECKED_LENGTHS]


def limit_of(model: nn.Module) -> float:
    """Return the largest difference of log-probabilities that rounding explains."""
    return 5e-2 if has_low_precision(model) else 1e-3


def has_low_precision(model: nn.Module) -> bool:
    """Return whether a model has weights in half precision, or in fewer bits."""
    return any(parameter.itemsize < 4 for parameter in model.parameters())


def difference_of(model: nn.Module, differences: Tensor) -> float:
    """Return the largest absolute value of `differences` (N,), or the mean for low precision.

    The mean is used if the model `has_low_precision`, because half precision rounds single logits
    by more than 0.1.
    """
    differences = differences.float().abs()
    return (differences.mean() if has_low_precision(model) else differences.max()).item()


def relative(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the differences, divided by max(1, largest absolute value in `expected`)."""
    return ((actual - expected).float() / expected.float().abs().max().clamp(min=1)).flatten()


def check_padding(
    numbers: str,
    model: nn.Module,
    backbone: object,
    difference: Callable[[], float],
) -> float:
    """Try the ways to compute a padded batch, the fastest first, until one is accurate enough.

    Leave the backbone set to the accurate way, and return the result of `difference` for it: how
    much results of a padded batch differ from results of single sequences. `numbers` names these
    results in messages.

    Raises:
        ModelError: the difference is too large in every way, even with a mask.
    """
    limit, found = limit_of(model), []
    for _ in _ways(backbone):
        found.append(difference())
        if found[-1] <= limit:
            return found[-1]
        logger.info(
            "In a padded batch, the %s differ by %.2g. Another way to compute is tried.",
            numbers,
            found[-1],
        )
    config: Any = model.config
    raise ModelError(
        f"{type(model).__name__} (model type {config.model_type}) is not supported: in a padded "
        f"batch, the {numbers} differ by {min(found):.2g} from the results without padding (limit "
        f"{limit:.0e}). Use another model."
    )


def _ways(backbone: object) -> Iterator[None]:
    """Set a backbone to its ways to compute a padded batch, one per iteration, fastest first."""
    yield
    if isinstance(backbone, DecoderBackbone):
        if backbone.fastest is Decoding.FAST:
            backbone.fastest = Decoding.PADDED
            yield
        backbone.passes_mask = True
        yield


@torch.no_grad()
def own_logprobs(policy: LanguageModel, tokens: Tokens) -> Tensor:
    """Return log-probabilities (S, V) after each token, by the model's own forward pass."""
    with policy.within(), torch.autocast(policy.device.type, enabled=False):
        ids = torch.tensor([tokens], device=policy.device)
        logits: Tensor = policy.model(input_ids=ids, use_cache=False).logits[0]
    return logits.float().log_softmax(dim=-1)


def _require_causal(policy: LanguageModel, own: OwnForward, limit: float) -> None:
    """Raise if a later token changes the log-probabilities of earlier tokens."""
    shorter = own_logprobs(policy, own.sequences[0][:-1])
    difference = difference_of(policy.model, (shorter - own.logprobs[0][:-1]).flatten())
    if not difference <= limit:
        config = text_config(policy.model.config)
        hint = ""
        if getattr(config, "is_decoder", True) is False:
            hint = " Its configuration does not set is_decoder=True."
        raise ModelError(
            f"{type(policy.model).__name__} (model type {policy.model.config.model_type}) is not "
            f"causal (difference {difference:.2g}): later tokens change the log-probabilities of "
            f"earlier tokens.{hint} Use a decoder-only model."
        )


def _candidates(backbone: DecoderBackbone) -> Iterator[Decoding]:
    """Yield the backends that may decode a model, the fastest first."""
    if backbone.decoding is Decoding.FAST:
        yield Decoding.FAST
    yield Decoding.PADDED
    yield Decoding.BY_LENGTH
    yield Decoding.COUNTING


def _decoded_difference(policy: LanguageModel, backbone: DecoderBackbone, own: OwnForward) -> float:
    """Decode the last tokens of each sequence; return the difference from `own`."""
    if backbone.pads_prompts:
        differences = _decode(policy, backbone, own)
    else:
        # Prompts of different lengths are never decoded together.
        differences = [
            each
            for tokens, logprobs in zip(own.sequences, own.logprobs, strict=True)
            for each in _decode(
                policy, backbone, OwnForward([tokens] * 2, [logprobs] * 2, own.sampled)
            )
        ]
    return difference_of(policy.model, torch.cat(differences))


def _decode(policy: LanguageModel, backbone: DecoderBackbone, own: OwnForward) -> list[Tensor]:
    """Return the differences at each step; drop and add a sequence if the backend supports it."""
    prompts = [tokens[: -own.sampled] for tokens in own.sequences]
    decoder = new_decoder(policy, backbone, prompts, own.sampled, splits_prompts=True)
    active = _Active(policy, decoder, own)
    differences = [active.difference()]
    for step in range(1, own.sampled):
        active.step()
        if step == 1 and decoder.drops_sequences:
            active.drop_first()
        # One more step follows, which decodes a token at the position after the added prompt.
        if step == own.sampled - 2 and can_add_prompts(policy, backbone):
            active.add_first(prompts)
        differences.append(active.difference())
    return differences


class _Active:
    """The sequences that a decoder reads, and the next position of each sequence."""

    def __init__(self, policy: LanguageModel, decoder: Decoder, own: OwnForward) -> None:
        self._policy = policy
        self._decoder = decoder
        self._own = own
        self._at = {n: len(tokens) - own.sampled for n, tokens in enumerate(own.sequences)}
        """Index in `own` of each active sequence -> its next position; in the decoder's order."""

    def _next(self) -> Tensor:
        tokens = [self._own.sequences[number][position] for number, position in self._at.items()]
        return torch.tensor(tokens, device=self._policy.device)

    def step(self) -> None:
        self._decoder.step(self._next())
        self._at = {number: position + 1 for number, position in self._at.items()}

    def drop_first(self) -> None:
        del self._at[0]
        self._decoder.keep(torch.arange(1, len(self._own.sequences), device=self._policy.device))

    def add_first(self, prompts: Sequence[Tokens]) -> None:
        self._decoder.add(prompts[:1])
        self._at[0] = len(prompts[0])

    def difference(self) -> Tensor:
        """Return the differences of the next tokens' log-probabilities (b,)."""
        logprobs = self._policy.logits(self._decoder.states).float().log_softmax(dim=-1)
        expected = torch.stack([self._own.logprobs[n][at - 1] for n, at in self._at.items()])
        return (logprobs - expected).gather(1, self._next()[:, None])[:, 0]
