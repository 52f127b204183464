"""A trained policy becomes a version, and the version is promoted or refused."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.inputs.cache import digest_of_model
from pipeline.inputs.flow_run import SETTINGS_FILE, FlowRun
from pipeline.inputs.rows import read_jsonl
from pipeline.promotion import decide
from pipeline.promotion.version_card import version_card
from pipeline.registry.artifact import VersionContents, write_artifact
from pipeline.registry.champions import challenge
from pipeline.registry.decisions import Decision
from pipeline.registry.versions import register_version, write_card
from pipeline.reports.headline_metrics import evaluation_numbers
from pipeline.settings.decoding import Decoding
from pipeline.settings.settings import Settings, as_plain_dict

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Everything that is known of a policy when it is registered."""

    settings: Settings
    run: FlowRun
    sft: Result
    reward_model: Result
    trained: Result
    validation: Result
    evaluation: Result

    @cached_property
    def models(self) -> dict[str, tuple[str, str]]:
        """Place and digest of each model of the run, by its part in it."""
        places = {
            "base": self.settings.policy,
            "sft": self.sft["path"],
            "reward_model": self.reward_model["path"],
            "policy": self.trained["path"],
        }
        return {part: (place, digest_of_model(place)) for part, place in places.items()}

    @property
    def kl(self) -> float:
        """Nats of an answer from SFT; of the last update where answers are greedy or cut."""
        measured: float | None = self.evaluation["kl"]["ppo"]
        return self.trained["objective"]["objective/kl"]["last"] if measured is None else measured


def register(candidate: Candidate) -> Result:
    """Register a policy as a version and decide on it.

    Every call may be made again: of one run of the flow there is one version and one decision.

    Returns:
        `model`: name, version, uri and run of the version; `promotion`: the decision; and the
        `evaluation` that it rests on.

    Raises:
        ModelError: MLflow refuses, or gives no answer.
    """
    settings, run = candidate.settings, candidate.run
    decoding = _decoding(settings)
    card = version_card(_record(candidate, candidate.evaluation, decoding, None, None))
    contents = VersionContents(
        name=settings.registered_model,
        decoding=decoding,
        example=read_jsonl(candidate.evaluation["samples"])[0]["prompt"],
        card=card,
        settings=run.folder / SETTINGS_FILE,
    )
    model = register_version(
        settings.registered_model,
        run_id=run.tracking["parent"],
        flow_run=run.id,
        write=lambda folder, model_id: write_artifact(
            Path(candidate.trained["path"]),
            folder,
            contents,
            run_id=run.tracking["parent"],
            model_id=model_id,
        ),
        tags=_tags(candidate),
        card=card,
        scratch=run.folder,
    )
    number = int(model["version"])
    challenge(settings.registered_model, number)
    decision, evaluation = decide.decide(
        settings,
        number,
        candidate.evaluation,
        candidate.validation,
        kl=candidate.kl,
        by=f"run {run.id}",
        folder=run.folder,
    )
    record = _record(candidate, evaluation, decoding, number, decision)
    write_card(settings.registered_model, number, version_card(record))
    return {"model": model, "promotion": asdict(decision), "evaluation": evaluation}


def _decoding(settings: Settings) -> Decoding:
    return Decoding(
        response_length=settings.ppo.response_length,
        temperature=settings.evaluation.temperature,
        top_k=settings.evaluation.top_k,
        top_p=settings.evaluation.top_p,
        stop_token=settings.ppo.stop_token,
        stop_token_id=settings.ppo.stop_token_id,
    )


def _tags(candidate: Candidate) -> dict[str, str]:
    """Where the version comes from; the champion is the one of the run's start."""
    judge, champion = candidate.evaluation["judge"], candidate.evaluation["champion"]
    return {
        **candidate.run.origin,
        **{f"model/{part}": digest for part, (_, digest) in candidate.models.items()},
        "judge": judge["name"],
        "judge_version": judge["version"],
        "parent_champion": "none" if champion is None else str(champion),
    }


def _record(
    candidate: Candidate,
    evaluation: Mapping[str, Any],
    decoding: Decoding,
    version: int | None,
    decision: Decision | None,
) -> Result:
    """What the card says."""
    judge = evaluation["judge"]
    models = {
        part: {"name": place, "digest": digest}
        for part, (place, digest) in candidate.models.items()
    }
    return {
        "name": candidate.settings.registered_model,
        "version": version,
        "models": {**models, "judge": {"name": judge["name"], "digest": judge["version"]}},
        "data": {
            one.name: {"name": one.source, "digest": one.digest, "rows": one.rows}
            for one in candidate.run.data
        },
        "win_rate": evaluation["win_rate"],
        "reasons": evaluation["reasons"],
        "metrics": evaluation_numbers(evaluation),
        "decoding": decoding.arguments(),
        "samples": read_jsonl(evaluation["samples"]),
        "decision": asdict(decision) if decision else None,
        "settings": as_plain_dict(candidate.settings),
    }
