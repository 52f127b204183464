"""The report on a reward model: accuracy, calibration, contract, probes and the verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.judges.judge_budget import Spent


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Accuracy on pairs, with its 95 % interval."""

    accuracy: float
    """Fraction of the pairs whose preferred response scores higher; equal scores count as half."""

    low: float
    """Lower end of the 95 % interval, see `measure_rate`."""

    high: float
    """Upper end of the 95 % interval."""

    n: int
    """Number of pairs."""


@dataclass(frozen=True, kw_only=True)
class Ties:
    """The scores of pairs that people rated as equal."""

    n: int
    """Number of ties between different texts."""

    identical: int
    """Number of ties between identical texts. No other field includes these ties."""

    margin: float | None
    """Mean absolute score margin of the `n` ties; None if `n` is 0."""

    decided_margin: float
    """Mean absolute score margin of the pairs with a preferred response."""

    auc: float | None
    """Probability that the absolute margin of a decided pair exceeds the absolute margin of a tie;
    None if `n` is 0."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Agreement of people on the pairs with several votes."""

    mean: float
    """Fraction of the votes on a pair that agree with the majority, averaged over pairs."""

    by_chance: float
    """Expected value of `mean` with random votes, for example 0.75 with two votes per pair."""

    n: int
    """Number of pairs with several votes, ties included."""


@dataclass(frozen=True, kw_only=True)
class Accuracy(Rate):
    """Accuracy of a reward model on held-out pairs without ties, with baselines."""

    margin_of: str
    """Source of the margins of `by_margin`: `people`, or `model` if people gave no margins."""

    by_margin: dict[str, Rate]
    """If people gave margins: for each of several thresholds, the accuracy on pairs with larger
    margins. Otherwise: accuracy by quartile of the model's absolute margin."""

    by_category: dict[str, Rate]
    """Accuracy by category, beginning with the category with most pairs; may be empty."""

    longer: Rate
    """Accuracy of always preferring the response with more characters."""

    random: float = 0.5
    """Accuracy of a random choice."""

    anchors: dict[str, float]
    """Published accuracies by model size."""

    ties: Ties
    """Results on the tied pairs, which are not among the `n` pairs of the accuracy."""

    people: Agreement | None
    """Agreement of people, a practical upper bound of `accuracy`; None if no pair has several
    votes."""


@dataclass(frozen=True, kw_only=True)
class Bin(Rate):
    """Accuracy on pairs of similar confidence."""

    confidence: float
    """Mean probability that the model assigns to its own choices."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Quality of sigmoid(margin) as a prediction of people's preference."""

    error: float
    """Expected calibration error, from 0 to 1. Sampling noise contributes up to
    0.4 * sqrt(bins / N), for example 0.04 for 1,000 pairs in 10 bins."""

    overconfidence: float
    """Mean confidence minus accuracy. Above 0, the model is overconfident. Below 0, the model is
    underconfident, for example because all of its scores are small."""

    brier: float
    """Mean squared error of sigmoid(margin) against people's choice; 0.25 if all margins are 0."""

    log_loss: float
    """Mean -log probability of people's choice, in nats; 0.693 if all margins are 0."""

    temperature: float | None
    """Divisor of the scores that minimizes the log loss; above 1, the model is overconfident. None
    if there is no minimum, because the mean margin is at most 0 or no margin is below 0."""

    bins: list[Bin]
    """Bins of the reliability diagram, by increasing confidence."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Dependence of scores on the length of a response, in characters."""

    correlation: float | None
    """Spearman correlation of score and length over all held-out responses; None if all scores or
    all lengths are equal."""

    within_prompts: float | None
    """Spearman correlation of score and length among the samples of a prompt, averaged over
    prompts; None if it is undefined for every prompt."""

    prompts: int
    """Number of prompts over which `within_prompts` is averaged."""

    shorter: Rate | None
    """Accuracy on the pairs whose chosen response is shorter; None if there is no such pair."""

    longer: Rate | None
    """Accuracy on the pairs whose chosen response is longer; None if there is no such pair."""


@dataclass(frozen=True, kw_only=True)
class References:
    """Scores of references, compared with the scores of samples for the same prompts."""

    mean: float
    """Mean score of the references."""

    above_samples: float
    """Probability that a reference scores above a random sample for the same prompt, averaged over
    prompts; equal scores count as half."""

    low: float
    """Lower end of the 95 % interval of `above_samples` (bootstrap by prompt); 0 if there is
    only one prompt."""

    high: float
    """Upper end of the 95 % interval of `above_samples` (bootstrap by prompt); 1 if there is
    only one prompt."""


@dataclass(frozen=True, kw_only=True)
class SampleScores:
    """Statistics of the scores of K samples for each of M prompts."""

    prompts: int
    """Number M of prompts."""

    per_prompt: int
    """Number K of samples per prompt."""

    mean: float
    """Mean score of all samples."""

    deviation: float
    """Standard deviation of the scores of all samples."""

    within_prompts: float
    """Standard deviation among the samples of a prompt: the square root of the mean of the variance
    over prompts. PPO learns only from differences among the samples of a prompt."""

    minimum: float
    """Lowest score."""

    maximum: float
    """Highest score."""

    quantiles: dict[str, float]
    """Percentiles of the scores; the keys are the percentages as text."""

    counts: list[int]
    """Number of samples in each bin of the histogram of scores."""

    edges: list[float]
    """Edges of the histogram bins, `len(counts) + 1` values."""

    best_of: dict[str, float]
    """Expected highest score of k samples of a prompt, averaged over prompts; the keys are k as
    text."""

    references: References | None
    """Comparison with references; None if the prompts have no references, or if a reference is too
    long for the reward model."""


@dataclass(frozen=True, kw_only=True)
class Samples(SampleScores):
    """Statistics of the scores of samples, and the fraction of repeated samples."""

    duplicates: float
    """Fraction of the samples that repeat an earlier sample for the same prompt."""


GOOD_BEST_OF_4 = 0.6
"""Minimum of `best_of["4"]` of a good reward model. tests/benchmarks/EXPERIMENTS.md describes the
experiments from which this number comes."""


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """The reward model's choices among the policy's own samples, compared with the judge."""

    judge: str
    """Name of the judge."""

    prompts: int
    """Number of prompts whose samples the judge compared."""

    per_prompt: int
    """Number K of samples per prompt; they form K // 2 pairs."""

    pairs: int
    """Number of pairs, including ties and pairs without a verdict."""

    ties: int
    """Number of pairs with a verdict, but without a winner. Pairs of equal texts are also ties; the
    judge was not asked about them."""

    invalid: int
    """Number of pairs without a verdict."""

    accuracy: Rate | None
    """Fraction of the decided pairs that reward model and judge order in the same way; None if no
    pair is decided."""

    best_of: dict[str, float]
    """k as text -> rate at which the judge prefers the reward model's best of k samples to a random
    sample that is not one of these k; ties count as half. A random choice reaches 0.5."""

    low: float
    """Lower end of the 95 % interval of the best of four. The interval allows for early stopping:
    the judge is asked only until the result is clear."""

    high: float
    """Upper end of this interval."""

    least: float
    """Limit of the gate, which `low` must exceed."""

    spent: dict[str, Spent]
    """Calls and tokens by name of the judge, for judges that ask a server."""

    @property
    def usefulness(self) -> str:
        """`useless`, `usable` or `good`: what PPO can gain from this model on this policy."""
        if self.low <= self.least:
            return "useless"
        return "good" if self.best_of_four >= GOOD_BEST_OF_4 else "usable"

    @property
    def best_of_four(self) -> float:
        """Rate at which the judge prefers the best of four samples, see `best_of`."""
        return self.best_of["4"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between two ways to score the same texts."""

    largest: float | None
    """Largest absolute difference between the two scores of a text; None if a score is not
    finite."""

    share: float | None
    """`largest` divided by the standard deviation of real texts' scores; None if `largest` is None
    or this deviation is 0."""


@dataclass(frozen=True, kw_only=True)
class EndOfText:
    """Comparison of scores with and without the end-of-sequence token after each response."""

    as_set: bool
    """Whether the present setting adds the token."""

    difference: float
    """Mean absolute difference between the two scores of a response."""

    accuracy: float
    """Accuracy with the present setting."""

    other_accuracy: float
    """Accuracy on the same pairs with the other setting."""

    gain_low: float
    """Lower end of the 95 % interval of other_accuracy - accuracy, see `difference_interval`."""

    gain_high: float
    """Upper end of the 95 % interval of other_accuracy - accuracy, see `difference_interval`."""

    n: int
    """Number of pairs."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Comparison of a tokenizer with its model."""

    largest_id: int
    """Largest id in the vocabulary, without the pad token, which is often added after training."""

    embeddings: int
    """Number of token embeddings of the model; every id must be below this number."""

    unknown: float | None
    """Fraction of unknown tokens in real texts; None if the tokenizer has no unknown token, or the
    texts have no tokens."""

    digest: str
    """SHA-256 of the vocabulary (tokens with ids) and the special tokens."""

    chat_template: str | None
    """SHA-256 of the chat template; None if there is no chat template."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Comparison of scores of the same texts, computed in different ways."""

    deviation: float
    """Standard deviation of the scores of the real texts."""

    batch: Difference
    """Difference between scoring each text alone and scoring all texts in one batch."""

    right_filler: Difference
    """Difference between one batch and the same batch with more padding on the right (up to twice
    the width)."""

    left_filler: Difference | None
    """Difference between scoring each text alone and in one left-padded batch; None if the model
    does not support left padding."""

    odd_scores: dict[str, float | None]
    """Scores of unusual texts by name; None for a score that is not finite."""

    end_of_text: EndOfText | None
    """Comparison of scores with and without the end-of-sequence token; None if not possible."""

    vocabulary: Vocabulary
    """Comparison of the tokenizer with the model."""

    reasons: list[str]
    """Reasons why the model is not fit, as sentences; empty if it passes all checks."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Result of one probe, which changes every reference in one way.

    The score of the changed reference is compared with the scores of other texts, its rivals. If a
    probe makes several changed versions of a reference, the lowest of their scores counts.
    """

    preferred: float
    """Fraction of the references for which the changed version scores above all rivals; equal
    scores count as half."""

    low: float
    """Lower end of the 95 % interval (Wilson)."""

    high: float
    """Upper end of the 95 % interval (Wilson)."""

    gain: float
    """Mean of the changed version's score minus the best rival's score."""

    n: int
    """Number of references."""

    gating: bool
    """Whether a preference for the changed version is a reason to refuse the model."""


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Results of all probes of a reward model."""

    probes: dict[str, Probe]
    """Results by name of the probe; empty if every reference was left out."""

    left_out: int
    """Number of references that were left out, because they have at most three words or because a
    changed version exceeds the context."""

    reasons: list[str]
    """Reasons to refuse the model, as sentences; empty if it passes."""


@dataclass(frozen=True, kw_only=True)
class RewardReport:
    """All measurements of a reward model, and the verdict on it."""

    fit: bool
    """Whether the reward model passed the gate."""

    reasons: list[str]
    """Reasons why the reward model failed the gate; empty if it passed."""

    training: Mapping[str, int | float]
    """Metrics of the model's training; empty if the run did not train the model."""

    accuracy: Accuracy
    calibration: Calibration
    lengths: Lengths
    samples: Samples
    contract: Contract
    probes: Probes

    bias: float
    """Offset of the scores: PPO's reward is gain * (score - bias)."""

    gain: float
    """Factor of the scores, see `bias`."""

    warnings: list[str] = field(default_factory=list)
    """Sentences on weaknesses of the reward model that are not reasons to refuse it."""

    on_policy: OnPolicy | None = None
    """Comparison with the judge on the policy's own samples; None if no judge could be asked."""

    people: Rate | None = None
    """Accuracy on the pairs of policies' answers that people labeled, see `RunData.voted_pairs`;
    None without such pairs."""

    accepted_by_hand: bool = False
    """Whether a person accepted the reward model although it failed the gate."""
