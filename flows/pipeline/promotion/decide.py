"""From a registered candidate to a decision: it is judged against the champion of that moment."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.evaluation.promotion_gate import reasons_against, reasons_for
from pipeline.inputs import data_sets
from pipeline.inputs.cache import make_once
from pipeline.inputs.flow_run import JUDGEMENTS, SAMPLES
from pipeline.registry import champions
from pipeline.registry.alias_sync import settle
from pipeline.registry.aliases import read_version
from pipeline.registry.champion_history import Champions
from pipeline.registry.decisions import Decision
from pipeline.registry.versions import find_policy
from pipeline.settings.settings import Settings
from ppo_core.data.prompts import check_prompt_lengths, context_length, encode_prompt
from ppo_core.distributed.process import large_imports
from ppo_core.errors import DataError
from ppo_core.models.loading import load_config, load_tokenizer
from serving.champion import fetch_champion
from serving.manifest import MANIFEST_TAG

Result = dict[str, Any]

EVALUATION = "evaluation.json"
"""In the folder of a later judgement: its result, for a step that is started again."""


def find_champion(settings: Settings) -> Result:
    """The present champion's version, and where its model and tokenizer lie on this machine.

    All three are None where there is no champion yet.

    Raises:
        DataError: it cannot read the prompts that policies are judged on.
        ModelError: it cannot be read from the registry, or is not what was registered.
    """
    return _fetch(settings, settle(settings.registered_model).champion)


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
    state that it was made for. Each of these judgements has a folder of its own, and is not made
    twice. A candidate that a person made champion meanwhile stays that.

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
    name, first = settings.registered_model, evaluation
    while True:
        state = settle(name)
        if earlier := state.decided(by, version):
            # This step had decided before it was started again.
            before = Champions(state.decisions[: earlier.number - 1])
            return earlier, _judged(settings, first, before.champion, folder)
        if state.champion == version:
            return _last_about(version, state), first
        evaluation = _judged(settings, first, state.champion, folder)
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


def _judged(settings: Settings, first: Result, champion: int | None, folder: Path) -> Result:
    """The evaluation against a champion: the first one, or one that is made and kept."""
    if first["champion"] == champion:
        return first

    def judge_again(unfinished: Path) -> None:
        # Seconds, for which a candidate does not wait whose champion is still the same.
        with large_imports():
            from pipeline.evaluation.evaluate_policies import evaluate_again

        made = evaluate_again(settings, first, _fetch(settings, champion), unfinished)
        (unfinished / EVALUATION).write_text(json.dumps(made), encoding="utf-8")

    name = f"against-{'sft' if champion is None else champion}"
    # Of the first one: the candidate's answers and the judge may be others if it was made anew.
    again = make_once(folder, name, {"first": first}, judge_again).path
    evaluation: Result = json.loads((again / EVALUATION).read_text(encoding="utf-8"))
    return {
        **evaluation,
        "samples": str(again / SAMPLES),
        "judgements": str(again / JUDGEMENTS),
    }


def _last_about(version: int, state: Champions) -> Decision:
    """The decision by which a version became the champion that it is."""
    made = (version, version)
    return [each for each in state.decisions if (each.version, each.champion) == made][-1]


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
    champion = {"version": version, "model": str(model), "tokenizer": str(tokenizer)}
    check_champion(settings, champion)
    return champion


def check_champion(settings: Settings, champion: Mapping[str, Any]) -> None:
    """Refuse a champion that could not answer, while nothing is lost by that.

    Args:
        settings: of the run.
        champion: its `version`, `model` and `tokenizer`.

    Raises:
        DataError: it cannot read a prompt, or leaves no room for the answer.
        ModelError: its configuration or its tokenizer cannot be loaded.
    """
    tokenizer = load_tokenizer(champion["tokenizer"])
    rows = data_sets.examples(settings.eval_prompts, settings.evaluation)
    try:
        check_prompt_lengths(
            [encode_prompt(tokenizer, row["prompt"]) for row in rows],
            context=context_length(load_config(champion["model"])),
            response_length=settings.ppo.response_length,
        )
    except DataError as error:
        raise DataError(
            f"eval_prompts={settings.eval_prompts}, which the champion, version "
            f"{champion['version']} of '{settings.registered_model}', has to answer too: {error}"
        ) from error
