"""From a registered candidate to a decision about its promotion."""

from pathlib import Path

from pipeline.evaluation.promotion_gate import reasons_to_promote, reasons_to_refuse
from pipeline.inputs.cache import make_once
from pipeline.promotion.champion import fetch_version
from pipeline.registry import champions
from pipeline.registry.alias_sync import settle
from pipeline.registry.champion_history import Champions
from pipeline.registry.decisions import Decision
from pipeline.results import EvaluatedPolicy, ValidatedReward
from pipeline.settings.settings import Settings
from ppo_core.distributed.process import large_imports


def decide_promotion(
    settings: Settings,
    version: int,
    evaluation: EvaluatedPolicy,
    validation: ValidatedReward,
    *,
    kl: float,
    by: str,
    folder: Path,
) -> tuple[Decision, EvaluatedPolicy]:
    """Promote a candidate or refuse it, and write the decision to the history.

    If the champion has changed since the candidate was evaluated, the candidate is evaluated
    against the new champion. This repeats until a decision is written while its champion is still
    the current one. Each evaluation has a folder of its own and is made once. A candidate that a
    person has promoted meanwhile stays champion.

    Args:
        settings: settings of the run.
        version: version number of the candidate.
        evaluation: the first evaluation of the candidate.
        validation: the verdict on the reward model.
        kl: KL divergence between the candidate and SFT, nats per answer.
        by: who decides: "run FLOW/NUMBER".
        folder: folder for further evaluations.

    Returns:
        The decision, and the evaluation that it rests on.
    """
    name, first = settings.registered_model, evaluation
    while True:
        state = settle(name)
        if earlier := state.decided(by, version):
            # An earlier attempt of this step has decided.
            before = Champions(state.decisions[: earlier.number - 1])
            return earlier, _evaluated(settings, first, before.champion, folder)
        if state.champion == version:
            return _promotion_of(version, state), first
        evaluation = _evaluated(settings, first, state.champion, folder)
        report = evaluation.report()
        against = reasons_to_refuse(
            report,
            settings.promotion,
            reward_model_fit=validation.fit,
            candidate=version,
            champion=state.champion,
            kl=kl,
        )
        decision = champions.decide(
            name,
            version=version,
            promote=not against,
            reasons=against or reasons_to_promote(report),
            by=by,
            key=by,
            after=state,
        )
        if decision is not None:
            return decision, evaluation


def _evaluated(
    settings: Settings, first: EvaluatedPolicy, champion: int | None, folder: Path
) -> EvaluatedPolicy:
    """Return the evaluation against a champion: the first one, or another one made once."""
    if first.champion == champion:
        return first

    def evaluate(unfinished: Path) -> None:
        # Importing what answers and judges takes seconds, and is needed only for a new champion.
        with large_imports():
            from pipeline.evaluation.evaluate_policies import evaluate_again

        fetched = None if champion is None else fetch_version(settings, champion)
        evaluate_again(settings, first, fetched, unfinished)

    name = f"against-{'sft' if champion is None else champion}"
    # The key has the whole first report: the candidate's answers and the judge may change.
    again = make_once(folder, name, {"first": first.report()}, evaluate).path
    return EvaluatedPolicy(champion=champion, kl=first.kl, folder=str(again))


def _promotion_of(version: int, state: Champions) -> Decision:
    """Return the decision that made a version the current champion."""
    promoted = (version, version)
    return [each for each in state.decisions if (each.version, each.champion) == promoted][-1]
