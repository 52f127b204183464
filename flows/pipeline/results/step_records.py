"""Records that the steps of the flow pass on: locations of files, and small numbers.

A location is a path, a hub id, or the address of a published file; see `Workspace`. FILE_FIELDS of
a record lists the fields whose files a step publishes if the steps share no disk.

Metaflow pickles these records between steps, so this module imports nothing large. Reports are
stored as JSON files; `ValidatedReward.report` and `EvaluatedPolicy.report` read them.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pipeline.judges.judge_budget import Spent
from pipeline.results.evaluation import Evaluation, TrainedJudge
from pipeline.results.report_files import EVALUATION_FILE, read_report
from pipeline.results.reward_report import RewardReport
from pipeline.results.selection import Selection

if TYPE_CHECKING:
    from pipeline.registry.decisions import Decision
    from pipeline.storage.workspace import Workspace

SAMPLES, JUDGEMENTS, GUARD_SCORES = "samples.jsonl", "judgements.jsonl", "guards.jsonl"
TASK_SCORES = "tasks.jsonl"
"""Files in an evaluation's folder: SAMPLES contains the answers to each prompt, JUDGEMENTS all
verdicts, GUARD_SCORES the scores of the answers by guard and policy, and TASK_SCORES the scores on
the tasks that are guards."""


@dataclass(frozen=True, kw_only=True)
class PreparedModel:
    """A policy or a reward model that is ready for PPO."""

    FILE_FIELDS: ClassVar = ("path",)

    path: str
    """Location of the model."""

    digest: str
    """Digest of the model, as `model_digests.digest_of_model` returns it."""

    metrics: dict[str, float]
    """Final training metrics; empty if the flow did not train the model."""

    spent: dict[str, Spent] = field(default_factory=dict)
    """Calls and tokens of the judge that compared samples before the labeling, by name."""


@dataclass(frozen=True, kw_only=True)
class FreshPairs:
    """Labeled pairs of the policy's own samples."""

    FILE_FIELDS: ClassVar = ("path",)

    path: str
    """Location of the folder with the pairs, see `RunData.fresh_pairs`."""

    spent: dict[str, Spent]
    """Calls and tokens of the labelers in this run, by name."""


@dataclass(frozen=True, kw_only=True)
class FetchedChampion:
    """The champion, whose files are on this machine and were verified."""

    version: int
    model: str
    """Folder of the model."""
    tokenizer: str
    """Folder of the tokenizer."""


@dataclass(frozen=True, kw_only=True)
class ValidatedReward:
    """Result of validating a reward model, with the scaling of its scores for PPO."""

    FILE_FIELDS: ClassVar = ("report_file",)

    fit: bool
    """Whether the reward model passed the gate."""

    accepted_by_hand: bool
    """Whether a person accepted the reward model although it failed the gate."""

    reasons: list[str]
    """Reasons why the reward model failed the gate; empty if it passed."""

    bias: float
    """Offset of the scores: PPO's reward is gain * (score - bias)."""

    gain: float
    """Factor of the scores, see `bias`."""

    report_file: str
    """JSON file with all measurements."""

    judge: TrainedJudge | None = None
    """The judge that the run trained; None if the settings name a judge."""

    spent: dict[str, Spent] = field(default_factory=dict)
    """Calls and tokens of the judges that compared samples, by name."""

    is_used: bool = True
    """Whether PPO learns from the reward model, see `Settings.rewards`."""

    @property
    def refused(self) -> bool:
        """Whether PPO must not train against the reward model."""
        return not (self.is_harmless or self.accepted_by_hand)

    @property
    def is_harmless(self) -> bool:
        """Whether the reward model passed the gate, or PPO does not learn from it."""
        return self.fit or not self.is_used

    def report(self) -> RewardReport:
        """Read all measurements from `report_file`."""
        return read_report(Path(self.report_file), RewardReport)


@dataclass(frozen=True, kw_only=True)
class Change:
    """Values of a PPO metric in the first and the last update."""

    first: float
    last: float


@dataclass(frozen=True, kw_only=True)
class RewardRound:
    """The reward model of a round after the first, see `FreshPairsConfig.rounds`."""

    number: int
    """Number of the round, counted from 1."""

    path: str
    """Location of the reward model that PPO used in this round."""

    digest: str
    """Digest of the reward model."""


@dataclass(frozen=True, kw_only=True)
class EarlierPolicies:
    """Policies that PPO saved before its end, because `ppo.save_policies` is set."""

    FILE_FIELDS: ClassVar = ("path",)

    path: str
    """Location of the folder. Each policy has a subfolder, named after its update of PPO."""

    digest: str
    """Digest of the folder's files when they were written."""


@dataclass(frozen=True, kw_only=True)
class WatchedPrompt:
    """A training prompt, with greedy answers of the policy before, during and after PPO."""

    prompt: str

    answers: dict[int, tuple[str, float]]
    """Number of updates before an answer -> the answer and its score."""


@dataclass(frozen=True, kw_only=True)
class TrainedPolicy:
    """The policy after PPO, or the policy that was chosen instead, see `SelectionConfig`.

    In both cases, metrics, warnings and self-check come from the full training with PPO.
    """

    FILE_FIELDS: ClassVar = ("path",)

    path: str
    """Location of the policy."""

    digest: str
    """Digest of the folder's files when they were written."""

    objective: dict[str, Change]
    """First and last values of PPO's metrics, by metric name."""

    warnings: list[str]
    """Faults of the training, see `ppo_core.reporting.diagnosis`; after the evaluation, also a
    contradiction between judge and reward."""

    episodes_per_second: float
    """Throughput that the last update reported."""

    peak_rss_bytes: int
    """Peak resident memory of the largest training process."""

    tokens_sampled: int
    """Number of tokens of all responses."""

    tokens_trained: int
    """Number of response tokens on which policy and critic were trained, summed over all epochs."""

    self_check: dict[str, str | float]
    """Decoding of the policy, and for each model the differences between the forward pass of
    `ppo_core` and the model's own forward pass; see `ppo_core.training.self_check`."""

    watched: list[WatchedPrompt] = field(default_factory=list)
    """Prompts that PPO answered before its first update, and several times until its end."""

    rounds: list[RewardRound] = field(default_factory=list)
    """Reward models of the rounds after the first; empty with one round."""

    spent: dict[str, Spent] = field(default_factory=dict)
    """Calls and tokens of the labelers in the rounds after the first, and of language models that
    are rewards, by name."""

    earlier: EarlierPolicies | None = None
    """Policies that may be chosen instead of the last policy; None if there are none, or after the
    choice."""

    critic: PreparedModel | None = None
    """The critic at the end of PPO; None without `start_from`."""

    def fetched(self, workspace: "Workspace") -> "TrainedPolicy":
        """Fetch the policies; the critic and the reward models of the rounds stay where they are.

        Raises:
            DataError, ConfigError, StorageError: see `Workspace.fetch`.
        """
        found = workspace.fetch_files(replace(self, critic=None, rounds=[]))
        return replace(found, critic=self.critic, rounds=self.rounds)


@dataclass(frozen=True, kw_only=True)
class EvaluatedPolicy:
    """An evaluation of the trained policy, stored in its own folder."""

    FILE_FIELDS: ClassVar = ("folder",)

    champion: int | None
    """Champion version with which the policy was compared; None if there was no champion."""

    kl: float | None
    """KL divergence from SFT in nats per answer; None if the decoding allows no estimate."""

    folder: str
    """Folder of the report, the samples and the judgements."""

    selection: Selection | None = None
    """How the policy was chosen; None if `selection.method` is `last`."""

    @property
    def samples(self) -> Path:
        """File of the prompts with all answers."""
        return Path(self.folder) / SAMPLES

    @property
    def judgements(self) -> Path:
        """File of all verdicts."""
        return Path(self.folder) / JUDGEMENTS

    @property
    def guard_scores(self) -> Path:
        """File of the scores of all answers by the guards."""
        return Path(self.folder) / GUARD_SCORES

    @property
    def task_scores(self) -> Path:
        """File of the scores on the tasks that are guards; missing without such tasks."""
        return Path(self.folder) / TASK_SCORES

    def report(self) -> Evaluation:
        """Read all measurements."""
        return read_report(Path(self.folder) / EVALUATION_FILE, Evaluation)


@dataclass(frozen=True, kw_only=True)
class RegisteredPolicy:
    """The registered version of a policy, and the decision on its promotion."""

    model: dict[str, str]
    """Name, version, URI, run id and manifest digest, as `register_version` returns them."""

    promotion: "Decision"
    """The decision on whether the version becomes the champion, with the reasons."""

    evaluation: EvaluatedPolicy
    """The evaluation on which the decision is based."""

    kl: float
    """KL divergence from the SFT policy in nats per answer, as used for the decision."""

    alpha: float
    """The `alpha` of the decision, see `PromotionConfig`."""

    earlier_decisions: int
    """Number of earlier versions whose decisions used the same evaluation data."""

    previous: int | None
    """Version that a rollback right after the decision makes champion; None if there is none."""
