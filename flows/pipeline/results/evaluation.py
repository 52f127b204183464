"""Records of the evaluation of a policy: win rates, tests of the judge, statistics of answers."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pipeline.judges.judge_budget import Spent

Decided = Literal["better", "not better", "undecided"]
"""What the judged pairs show about a candidate."""


@dataclass(frozen=True, kw_only=True)
class SequentialTest:
    """Sequential test of a win rate. The test looks at the result after each batch of pairs."""

    least: float
    """Win rate that the candidate must exceed."""

    alpha: float
    """Largest probability that a candidate is found better although it is not."""

    evidence: float
    """Capital of bets on the candidate, in multiples of the stake. The candidate is found better if
    the capital after a batch is at least 1 / alpha."""

    decided: Decided

    asked: int
    """Number of pairs that the judge compared."""

    available: int
    """Number of pairs that the judge could have compared."""

    def may_reach(self, alpha: float) -> bool:
        """Return whether more pairs could show that the candidate is better at a smaller `alpha`.

        This is so if the test ended as "better" with evidence below 1 / `alpha`, and pairs are
        left.
        """
        is_early = self.decided == "better" and self.evidence < 1 / alpha
        return is_early and self.asked < self.available


@dataclass(frozen=True, kw_only=True)
class PeopleAndJudge:
    """A win rate from people's labels of some pairs and the judge's verdicts on all pairs."""

    rate: float
    """Win rate by PPI++ (arXiv:2311.01453)."""

    low: float
    """Lower end of the 95 % interval. The interval is valid no matter when the judge stops."""

    high: float
    """Upper end of this interval."""

    labels: int
    """Number of labeled prompts."""

    weight: float
    """Weight of the judge in [0, 1]; near 0, the judge adds nothing to the labels."""

    worth: float
    """Number of labels that people alone would have needed for an equal variance."""


@dataclass(frozen=True, kw_only=True)
class WinRate:
    """How often the candidate's answers beat the opponent's answers."""

    rate: float
    """Fraction of a prompt's valid pairs that the candidate won, averaged over prompts. A tie
    counts as half a win."""

    low: float
    """Lower end of the 95 % interval. The interval is valid no matter when the judge stops."""

    high: float
    """Upper end of this interval."""

    n: int
    """Number of valid pairs."""

    wins: int
    """Number of valid pairs that the candidate won in both orders."""

    losses: int
    """Number of valid pairs that the candidate lost in both orders."""

    ties: int
    """Number of the remaining valid pairs: both verdicts are ties, or the two verdicts differ."""

    invalid: int
    """Number of pairs without a verdict in at least one order; not counted in `n`."""

    flip_rate: float
    """Fraction of the valid pairs in which the judge chose the same position in both orders."""

    conclusive: bool
    """Whether the fraction of invalid pairs and `flip_rate` are within their limits."""

    reasons: list[str]
    """Why the rate is inconclusive; empty if it is conclusive."""

    judge: str
    """Name of the judge."""

    test: SequentialTest | None = None
    """The test of the rate; None for a contest on which no decision depends."""

    people: PeopleAndJudge | None = None
    """The win rate from people's labels and the judge's verdicts together; None if too few of the
    judged prompts have a label. If it is not None, `test` also uses the labels."""


@dataclass(frozen=True, kw_only=True)
class LengthBin:
    """Win rate of the pairs in one range of length ratios."""

    ratio: str
    """Range of (candidate's characters / opponent's characters), one of `RATIO_NAMES`."""

    rate: float
    """Win rate of the pairs in this range; a tie counts as half a win."""

    n: int
    """Number of valid pairs in this range."""

    judge: str
    """Name of the judge."""


@dataclass(frozen=True, kw_only=True)
class PairAgreement:
    """Agreement of two judges on the pairs for which each judge has a valid outcome."""

    judges: tuple[str, str]
    """Names of the two judges."""

    n: int
    """Number of pairs that are valid for both judges."""

    share: float | None
    """Fraction of these pairs to which both judges give the same outcome; None if `n` is 0."""

    kappa: float | None
    """Cohen's kappa; None if both judges together gave fewer than two different outcomes."""


@dataclass(frozen=True, kw_only=True)
class EnsembleAgreement:
    """Outcomes of each judge of an ensemble, and their agreement."""

    outcomes: dict[str, tuple[str, ...]]
    """By name of the judge: the outcome of each pair, from the verdicts on both orders."""

    rates: dict[str, float | None]
    """By name of the judge: the candidate's win rate over the pairs valid for this judge; None if
    no pair is valid."""

    pairs: list[PairAgreement]
    """Agreement of every combination of two judges."""

    fleiss_kappa: float | None
    """Fleiss' kappa over the pairs valid for all judges; None if these pairs have fewer than two
    different outcomes."""

    n: int
    """Number of pairs that are valid for all judges."""


@dataclass(frozen=True, kw_only=True)
class ContestResult(WinRate):
    """Win rate of a contest, with the win rates by length and the agreement of the judges."""

    length_controlled: float | None
    """Win rate at equal length; None if no pair has about equal lengths."""

    equal_length_pairs: int
    """Number of valid pairs of about equal length."""

    by_length_ratio: list[LengthBin]
    """Win rates by the ratio of candidate's to opponent's length, smallest ratio first."""

    agreement: EnsembleAgreement | None
    """Agreement of the judges of an ensemble; None for a single judge."""

    style_controlled: float | None = None
    """Win rate at equal length and equal Markdown; None if it cannot be measured."""

    equal_style_pairs: int = 0
    """Number of valid pairs of about equal length and with equal Markdown."""


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Difference between two policies' win rates on the same prompts and opponents."""

    difference: float
    """Win rate of the first policy minus win rate of the second, over pairs valid for both."""

    low: float
    """Lower end of the 95 % interval."""

    high: float
    """Upper end of the 95 % interval."""

    n: int
    """Number of pairs that are valid for both policies."""

    judge: str
    """Name of the judge."""


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Result of the SFT policy when its answers are not its ordinary samples, see `Baselines`."""

    win_rate: WinRate | None
    """Win rate against SFT's ordinary samples; None if it was not measured."""

    kl: float | None
    """KL divergence from SFT in nats per answer; None if it is not known."""

    gain: PairedDifference | None
    """Win rate of PPO minus this win rate, both against SFT; None if it was not measured."""

    why: str
    """Why the win rate was not measured; empty if it was measured."""


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Comparison of PPO with baselines of SFT on the same prompts; no decision depends on it."""

    found: dict[str, Baseline]
    """Baselines by name: `greedy` (the likeliest tokens) and `best_of_4` (the sample with the
    highest reward among four)."""

    ppo: WinRate | None
    """Win rate of PPO against SFT on the prompts of the baselines; None if nothing was measured."""

    note: str
    """A caution for readers of the comparison; may be empty."""


@dataclass(frozen=True, kw_only=True)
class CanaryKind:
    """Verdicts of a judge on the canaries of one kind."""

    asked: int
    """Number of prompts for which the judge was asked."""

    won: int
    """Number of prompts for which the canary won in both orders. For the kind "same": number of
    prompts for which the verdict was not a tie."""

    invalid: int
    """Number of prompts without a verdict in at least one order."""

    fell: bool
    """Whether the judge failed: `won` is above MAX_SHARE of `tested`."""

    @property
    def tested(self) -> int:
        """Number of prompts with a verdict in every order; 0 if the judge was not tested."""
        return self.asked - self.invalid


@dataclass(frozen=True, kw_only=True)
class CanaryReport:
    """Results of a judge on all kinds of canaries: pairs whose correct verdict is known."""

    kinds: dict[str, CanaryKind]
    """Results by kind: the keys of `CANARIES`, and "same" for an answer against itself. Empty if
    there was no answer to compare with."""

    reasons: list[str]
    """One sentence for each kind that the judge failed, and for each kind that was not tested."""

    sound: bool
    """Whether the judge passed all kinds."""


@dataclass(frozen=True, kw_only=True)
class TestedAnnotator:
    """A person who labeled pairs, compared with the judge by the labels of all other people."""

    n: int
    """Number of pairs that this person, at least one other person, and the judge labeled."""

    judge: float
    """Fraction of these pairs in which the judge agrees with at least as many of the other people
    as this person does."""

    person: float
    """Fraction of these pairs in which this person agrees with at least as many of the other people
    as the judge does."""

    p: float
    """p-value of the hypothesis that the judge is worse than this person by `cost` or more,
    adjusted for the number of people (Benjamini and Yekutieli)."""

    replaceable: bool
    """Whether the hypothesis is rejected."""


@dataclass(frozen=True, kw_only=True)
class AnnotatorTest:
    """The alternative annotator test (arXiv:2501.10970): may the judge replace a person?"""

    people: dict[str, TestedAnnotator]
    """The tested people by their id; empty if too few people labeled enough pairs."""

    cost: float
    """Fraction of pairs by which the judge may be worse than a person, because it costs less."""

    winning_rate: float | None
    """Fraction of the people that the judge can replace; None if it was not measured."""

    passed: bool | None
    """Whether the judge can replace at least half of the people; None if it was not measured."""

    why: str
    """Why the winning rate was not measured; empty if it was measured."""


@dataclass(frozen=True, kw_only=True)
class HumanAgreement:
    """Agreement of a judge with people's labels."""

    n: int
    """Number of labeled pairs for which the judge gave a verdict in both orders."""

    share: float | None
    """Fraction of these pairs whose outcome equals the label; None if `n` is 0."""

    kappa: float | None
    """Cohen's kappa; None if labels and outcomes together have fewer than two different values."""

    confusion: dict[str, dict[str, int]]
    """Number of pairs by label (outer key) and by the judge's outcome (inner key)."""

    invalid: int
    """Number of labeled pairs without a verdict in at least one order; not counted in `n`."""

    judge: str
    """Name of the judge."""

    alternative: AnnotatorTest | None = None
    """Whether the judge may replace one of the people; None if the labels name no annotators."""


@dataclass(frozen=True, kw_only=True)
class TrainedJudge:
    """The reward model that is the judge if the settings name no judge, with its accuracy."""

    FILE_FIELDS: ClassVar = ("path",)

    path: str
    """Folder of the model, or its address in S3."""

    accuracy: float
    """Fraction of the held-out pairs in which the preferred response scores higher."""

    low: float
    """Lower end of the 95 % interval of `accuracy`."""

    high: float
    """Upper end of the 95 % interval of `accuracy`."""

    n: int
    """Number of held-out pairs without ties."""


@dataclass(frozen=True, kw_only=True)
class JudgeIdentity:
    """Name and version of a judge."""

    name: str
    version: str


@dataclass(frozen=True, kw_only=True)
class JudgedContests:
    """Results of contests between answers to the same prompts, and of the tests of the judge."""

    judge: JudgeIdentity

    win_rate: dict[str, ContestResult]
    """Results by name of the contest, `CANDIDATE_vs_OPPONENT`."""

    canaries: CanaryReport

    people: HumanAgreement | None
    """Agreement of the judge with people's labels; None without labels."""

    conclusive: bool

    reasons: list[str]
    """Why the results are inconclusive; empty if they are conclusive."""


@dataclass(frozen=True, kw_only=True)
class ModelWinRate(JudgedContests):
    """Win rate of any model against references or itself, with the settings of the measurement."""

    settings: dict[str, Any]

    promoted_share: float | None
    """Fraction of simulated evaluations in which the gate promotes a policy that equals its
    opponent. Each simulation draws the prompts again with replacement. None unless the model is
    compared with itself."""


TASK_SOURCE = "lm_eval"
"""Start of `GuardResult.source` if the guard is a task of lm-evaluation-harness."""


@dataclass(frozen=True, kw_only=True)
class GuardResult:
    """Comparison of one property of the policy's answers and of its rival's answers.

    If the guard is a task, the documents of the task replace the prompts, and the scores are the
    task's scores. The rival is the champion, or SFT if there is no champion.
    """

    policy: float
    """Mean score of the policy's answers, over prompts; a score is between 0 and 1."""

    rival: float
    """Mean score of the rival's answers."""

    difference: float
    """`policy` minus `rival`."""

    low: float
    """Lower end of the 95 % interval of `difference`, from a confidence sequence."""

    high: float
    """Upper end of this interval."""

    n: int
    """Number of different prompts."""

    margin: float
    """Largest harmless loss against the rival, as a difference of mean scores."""

    passed: bool
    """Whether the policy passes. It fails if `high` is below 0, so that it is worse than the rival,
    and `low` is below -`margin`, so that the loss may be harmful."""

    source: str
    """`built-in`; or a user's function and the digest of its file; or lm_eval's version, metric and
    task."""

    @property
    def is_task(self) -> bool:
        """Whether the guard is a task of lm-evaluation-harness."""
        return self.source.startswith(f"{TASK_SOURCE} ")


@dataclass(frozen=True, kw_only=True)
class Evaluation(JudgedContests):
    """All measurements of a trained policy's answers."""

    notes: list[str]
    """Sentences that a reader of the win rates must know; may be empty."""

    trained_judge: TrainedJudge | None
    """The judge that the run trained; None if the settings name a judge."""

    champion: int | None
    """Champion version with which the policy was compared; None if there was no champion."""

    improvement: PairedDifference | None
    """Win rate of PPO minus win rate of SFT against the references; None without references."""

    distinct: dict[str, float]
    """Number of distinct answers divided by the number of answers, by contestant."""

    length: dict[str, float]
    """Mean number of words of an answer, by contestant."""

    repetition: dict[str, float]
    """Fraction of the 3-grams of words in an answer that repeat an earlier 3-gram, averaged over
    the distinct answers, by contestant."""

    kl: dict[str, float | None]
    """KL divergence from SFT in nats per answer, by policy; None if the decoding allows no
    estimate."""

    spent: dict[str, Spent]
    """Calls and tokens of each judge that asks a server, by name of the judge."""

    guards: dict[str, GuardResult]
    """Results of the guards by name."""

    baselines: Baselines | None = None
    """What SFT reaches without PPO; None with `evaluation.baseline_prompts = 0`."""

    @property
    def against_sft(self) -> ContestResult:
        """The result of the contest of PPO against SFT, which every run has."""
        return self.win_rate["ppo_vs_sft"]

    @property
    def kl_of_ppo(self) -> float | None:
        """KL divergence of the trained policy, see `kl`."""
        return self.kl["ppo"]

    @property
    def rival(self) -> str:
        """The contestant that the policy must beat: the champion, or SFT if there is none."""
        return "sft" if self.champion is None else "champion"

    @property
    def direct_contest(self) -> str:
        """Name of the contest against `rival`."""
        return f"ppo_vs_{self.rival}"
