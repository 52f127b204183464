"""From a registered candidate to a decision: it is judged against the champion of that moment."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from champion import MANIFEST_TAG, fetch_champion
from pipeline.gates import reasons_against, reasons_for
from pipeline.policy_evaluation import evaluate_again
from pipeline.registry import champions
from pipeline.registry.aliases import read_version
from pipeline.registry.ledger import Decision
from pipeline.registry.versions import find_policy
from pipeline.settings import Settings

Result = dict[str, Any]


def find_champion(settings: Settings) -> Result:
    """The present champion's version, and where its model and tokenizer lie on this machine.

    All three are None where there is no champion yet.

    Raises:
        ModelError: it cannot be read from the registry, or is not what was registered.
    """
    return _fetch(settings, champions.settle(settings.registered_model).champion)


def decide(
    settings: Settings,
    version: int,
    evaluation: Result,
    validation: Mapping[str, Any],
    *,
    kl: float,
    by: str,
    folder: Path,
) -> tuple[Decision, Result]:
    """Promote a candidate or refuse it, and put the decision on record.

    The champion may have changed since the candidate was judged, and may change while this
    runs: the candidate is then judged against the new one, until one decision follows on the
    state that it was made for.

    Args:
        settings: of the run.
        version: the candidate's.
        evaluation: what the judge said, and about which champion.
        validation: the report on the reward model.
        kl: nats of an answer between the candidate and SFT.
        by: who decides, the run of the flow.
        folder: where new judgements are written.

    Returns:
        the decision, and the evaluation that it rests on.
    """
    name = settings.registered_model
    while True:
        state = champions.settle(name)
        if earlier := state.decided(by, version):
            # This step had decided before it was started again.
            return earlier, evaluation
        if evaluation["champion"] != state.champion:
            rival = _fetch(settings, state.champion)
            evaluation = evaluate_again(settings, evaluation, rival, folder)
        against = reasons_against(
            evaluation,
            validation,
            settings.promotion,
            candidate=version,
            champion=state.champion,
            kl=kl,
        )
        made = champions.decide(
            name,
            version=version,
            promote=not against,
            reasons=against or reasons_for(evaluation),
            by=by,
            key=by,
            after=state,
        )
        if made is not None:
            return made, evaluation


def _fetch(settings: Settings, version: int | None) -> Result:
    name = settings.registered_model
    if version is None:
        return {"version": None, "model": None, "tokenizer": None}
    if MANIFEST_TAG in read_version(name, version).tags:
        cache = Path(settings.output_dir) / "cache" / "champions"
        folder = fetch_champion(name, version=version, cache=cache).folder
        model, tokenizer = folder / "model", folder / "components" / "tokenizer"
    else:
        # Somebody made a model champion that the flow did not register: it is what is in use.
        model, tokenizer = find_policy(f"models:/{name}/{version}")
    return {"version": version, "model": str(model), "tokenizer": str(tokenizer)}
