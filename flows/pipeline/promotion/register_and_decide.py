"""Register a trained policy as a version, and promote or refuse the version."""

from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from pipeline.cost.measured_cost import cost_of_run
from pipeline.inputs.flow_run import SETTINGS_FILE, FlowRun
from pipeline.inputs.json_lines import read_jsonl
from pipeline.inputs.lineage import EVALUATION_ROWS
from pipeline.inputs.model_digests import require_unchanged
from pipeline.inputs.row_digests import ROWS_FILE
from pipeline.judges.judge_budget import sum_spent
from pipeline.promotion.apply_promotion_gate import apply_promotion_gate
from pipeline.promotion.bill_of_materials import bill_of_materials
from pipeline.promotion.version_card import (
    NamedModel,
    VersionFacts,
    version_card,
    version_description,
)
from pipeline.registry.alpha_spending import limits_now
from pipeline.registry.artifact import VersionContents, write_artifact
from pipeline.registry.champion_history import Champions
from pipeline.registry.change_champion import challenge, read_champions
from pipeline.registry.decisions import Decision
from pipeline.registry.register_version import decided_on, register_version, write_card
from pipeline.registry.start_models import START_TAG, publish_start
from pipeline.results.evaluation import JudgeIdentity
from pipeline.results.step_records import (
    EvaluatedPolicy,
    FreshPairs,
    PreparedModel,
    RegisteredPolicy,
    TrainedPolicy,
    ValidatedReward,
)
from pipeline.settings.decoding import Decoding
from pipeline.settings.settings import Settings
from pipeline.storage.workspace import original_names
from pipeline.tracking.mlflow_runs import started_at
from ppo_core.config.reward_names import read_rewards

EVALUATION_DATA = "data/eval-prompts"
"""Tag of a version with the digest of the evaluation prompts, without copies of training texts."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A trained policy and everything that the run knows about it."""

    settings: Settings
    run: FlowRun
    sft: PreparedModel
    reward_model: PreparedModel
    trained: TrainedPolicy
    validation: ValidatedReward
    evaluation: EvaluatedPolicy
    fresh: FreshPairs | None = None

    @cached_property
    def models(self) -> dict[str, NamedModel]:
        """Each model of the run: base, SFT, reward model and policy."""
        return {
            "base": _named(self.settings.policy, self.run.origin["model/base"]),
            "sft": _named(self.sft.path, self.sft.digest),
            "reward_model": _named(self.reward_model.path, self.reward_model.digest),
            "policy": _named(self.trained.path, self.trained.digest),
        }

    @property
    def rewards(self) -> dict[str, NamedModel]:
        """Reward models of later rounds, and rewards of PPO other than the run's reward model."""
        named = {
            f"reward {one.name}": _named(one.source, self.run.origin[f"reward/{one.name}"])
            for one in read_rewards(self.settings.rewards)
            if not one.is_own
        }
        for one in self.trained.rounds:
            named[f"reward model, round {one.number}"] = _named(one.path, one.digest)
        return named

    def fetched(self) -> "Candidate":
        """Fetch the files that the registration reads.

        The weights of SFT are not fetched. The weights of the reward model are fetched only if the
        next run may start from them.

        Raises:
            DataError, ConfigError, StorageError: see `Workspace.fetch`.
        """
        fetch, trained = self.run.workspace.fetch_files, self.trained
        return replace(
            self,
            settings=fetch(self.settings),
            reward_model=fetch(self.reward_model) if trained.critic else self.reward_model,
            trained=replace(trained.fetched(self.run.workspace), critic=fetch(trained.critic)),
            validation=fetch(self.validation),
            evaluation=fetch(self.evaluation),
        )

    @property
    def kl(self) -> float:
        """KL divergence from SFT in nats per answer.

        The value comes from PPO's last update if the evaluation could not estimate the divergence,
        because it decodes greedily or with top-k or top-p.
        """
        if self.evaluation.kl is None:
            return self.trained.objective["objective/kl"].last
        return self.evaluation.kl


def register(candidate: Candidate) -> RegisteredPolicy:
    """Register a policy as a version, and decide whether the version is promoted.

    Repeated calls change nothing, because a run of the flow has one version and one decision.

    Raises:
        ModelError: MLflow refuses a request or does not answer, or the files of the policy were
            changed after training.
    """
    settings, run = candidate.settings, candidate.run
    decoding = _decoding(settings)
    facts = _facts(candidate, candidate.evaluation, decoding, None, None)
    contents = VersionContents(
        name=settings.registered_model,
        decoding=decoding,
        example=read_jsonl(candidate.evaluation.samples)[0]["prompt"],
        card=version_card(facts),
        settings=run.folder / SETTINGS_FILE,
        rows=run.folder / ROWS_FILE,
        sbom=bill_of_materials(
            settings.registered_model, candidate.models, run, started_at(run.tracking["parent"])
        ),
    )
    model = register_version(
        settings.registered_model,
        run_id=run.tracking["parent"],
        flow_run=run.id,
        write=partial(_write_judged, candidate, contents),
        tags=_tags(candidate, facts.evaluation.judge) | _start_of_next_run(candidate),
        description=version_description(facts),
        scratch=run.folder,
    )
    number = int(model["version"])
    challenge(settings.registered_model, number)
    decision, evaluation = apply_promotion_gate(
        settings,
        number,
        candidate.evaluation,
        candidate.validation,
        kl=candidate.kl,
        by=f"run {run.id}",
        folder=run.folder,
    )
    facts = _facts(candidate, evaluation, decoding, number, decision)
    write_card(settings.registered_model, number, version_card(facts), version_description(facts))
    decisions = read_champions(settings.registered_model).decisions[: decision.number]
    before = decisions[:-1]
    return RegisteredPolicy(
        model=model,
        promotion=decision,
        evaluation=evaluation,
        kl=candidate.kl,
        alpha=limits_now(settings.promotion, before).alpha,
        earlier_decisions=decided_on(
            settings.registered_model, before, _evaluation_tags(candidate)
        ),
        previous=Champions(decisions).previous,
    )


def _start_of_next_run(candidate: Candidate) -> dict[str, str]:
    """Upload reward model and critic for the next run; return the tag of the version."""
    critic, reward_model, run = candidate.trained.critic, candidate.reward_model, candidate.run
    if critic is None:
        return {}
    for model, what in ((reward_model, "The reward model"), (critic, "The critic")):
        require_unchanged(model.path, model.digest, what)
    digest = publish_start(
        run.tracking["parent"],
        Path(reward_model.path),
        Path(critic.path),
        run.folder / ROWS_FILE,
        run.folder,
    )
    return {START_TAG: digest}


def _write_judged(
    candidate: Candidate, contents: VersionContents, folder: Path, model_id: str
) -> str:
    """Write the policy as a version; raise if its files were changed after the training."""
    trained = candidate.trained
    run_id = candidate.run.tracking["parent"]
    manifest = write_artifact(
        Path(trained.path), folder, contents, run_id=run_id, model_id=model_id
    )
    # Checked last, so that a change before or during the writing is noticed.
    require_unchanged(trained.path, trained.digest, "The judged policy")
    return manifest


def _named(path: str, digest: str) -> NamedModel:
    return NamedModel(name=original_names(path), digest=digest)


def _decoding(settings: Settings) -> Decoding:
    return Decoding(
        response_length=settings.ppo.response_length,
        temperature=settings.evaluation.temperature,
        top_k=settings.evaluation.top_k,
        top_p=settings.evaluation.top_p,
        stop_token=settings.ppo.stop_token,
        stop_token_id=settings.ppo.stop_token_id,
    )


def _evaluation_tags(candidate: Candidate) -> dict[str, str]:
    """Return the digests of the evaluation prompts; runs of older code have no EVALUATION_ROWS."""
    origin = candidate.run.origin
    return {tag: origin[tag] for tag in (EVALUATION_ROWS, EVALUATION_DATA) if tag in origin}


def _tags(candidate: Candidate, judge: JudgeIdentity) -> dict[str, str]:
    """Return the tags of the version; `parent_champion` is the champion of the first evaluation.

    The version has only a few tags, because MLflow shows all of them. The tags about code, settings
    and data are in the MLflow run of the version, and the digests of all models are in the card.
    """
    champion = candidate.evaluation.champion
    return {
        **_evaluation_tags(candidate),
        "model/policy": candidate.trained.digest,
        "judge": judge.name,
        "parent_champion": "none" if champion is None else str(champion),
    }


def _facts(
    candidate: Candidate,
    evaluated: EvaluatedPolicy,
    decoding: Decoding,
    version: int | None,
    decision: Decision | None,
) -> VersionFacts:
    settings, run, evaluation = candidate.settings, candidate.run, evaluated.report()
    judge = NamedModel(name=evaluation.judge.name, digest=evaluation.judge.version)
    labeled = candidate.fresh.spent if candidate.fresh else {}
    trained = candidate.trained
    spent = sum_spent(labeled, trained.spent, candidate.validation.spent, evaluation.spent)
    return VersionFacts(
        name=settings.registered_model,
        version=version,
        models={**candidate.models, **candidate.rewards, "judge": judge},
        data=run.data,
        evaluation=evaluation,
        cost=cost_of_run(run, settings.hardware, trained, spent),
        decoding=decoding.arguments(),
        samples=read_jsonl(evaluated.samples),
        decision=decision,
        settings=asdict(settings),
    )
