"""Decide whether a registered candidate is promoted."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.judges.judge_budget import Spent
from pipeline.judges.judge_names import can_ask, read_access
from pipeline.promotion.fetch_champion import fetch_version
from pipeline.promotion.promotion_gate import reasons_to_promote, reasons_to_refuse
from pipeline.registry import change_champion
from pipeline.registry.alpha_spending import limits_now
from pipeline.registry.champion_history import Champions
from pipeline.registry.decisions import Decision
from pipeline.registry.sync_aliases import sync_aliases
from pipeline.results.evaluation import TrainedJudge
from pipeline.results.report_files import as_json
from pipeline.results.step_records import EvaluatedPolicy, ValidatedReward
from pipeline.settings.settings import Settings
from ppo_core.distributed.process import large_imports
from ppo_core.errors import ModelError
from ppo_core.io.folder_cache import folder_of, make_once


def apply_promotion_gate(
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

    If the champion changes meanwhile, the candidate is evaluated against the new champion. If other
    decisions have lowered alpha, the judge compares more pairs. Each evaluation is made once; a
    repeated step reuses it.

    Args:
        settings: settings of the run.
        version: version number of the candidate.
        evaluation: the first evaluation of the candidate.
        validation: result of validating the reward model.
        kl: KL divergence of the candidate from SFT, nats per answer.
        by: author of the decision, "run FLOW/NUMBER".
        folder: folder for further evaluations.

    Returns:
        The decision, and the evaluation on which the decision is based.
    """
    name, first = settings.registered_model, evaluation
    while True:
        state = sync_aliases(name)
        earlier = state.decided(by, version)
        before = _before(state, earlier)
        with_limits = replace(settings, promotion=limits_now(settings.promotion, before.decisions))
        spent = evaluation.report().spent
        evaluated = partial(_evaluated, with_limits, first, folder, validation.judge, spent)
        if earlier:
            return earlier, evaluated(before.champion)
        if state.champion == version:
            return _promotion_of(version, state), first
        evaluation = evaluated(state.champion)
        report = evaluation.report()
        against = reasons_to_refuse(
            report,
            with_limits.promotion,
            reward_model_fit=validation.is_harmless,
            candidate=version,
            champion=state.champion,
            kl=kl,
        )
        decision = change_champion.record_decision(
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


def _before(state: Champions, earlier: Decision | None) -> Champions:
    """Return the history before the decision of this step.

    `earlier` is the decision of an earlier attempt of this step; None if there is none.
    """
    return Champions(state.decisions[: earlier.number - 1]) if earlier else state


def _evaluated(
    settings: Settings,
    first: EvaluatedPolicy,
    folder: Path,
    judge: TrainedJudge | None,
    spent: Mapping[str, Spent],
    champion: int | None,
) -> EvaluatedPolicy:
    """Return the evaluation against a champion: `first`, a cached evaluation, or a new one.

    `spent` is what the judge has spent on all evaluations so far.
    """
    report, alpha = first.report(), settings.promotion.alpha
    tests = [one.test for one in report.win_rate.values() if one.test]
    # This step may run without the key of the judge.
    has_judge = judge is not None or can_ask(settings.judge)
    if first.champion == champion and not (
        has_judge and any(one.may_reach(alpha) for one in tests)
    ):
        return first
    if not has_judge and read_access(settings.judging.base_url).is_openai:
        raise ModelError(
            f"The champion of '{settings.registered_model}' changed during the run, from "
            f"{_shown(first.champion)} to {_shown(champion)}. The policy must be judged against "
            "the new one, but this step has no key of the judge, so nothing is decided. A new run "
            "repeats only the evaluation."
        )

    def evaluate(unfinished: Path) -> None:
        # This import takes seconds, and only a further evaluation needs it.
        with large_imports():
            from pipeline.evaluation.evaluate_policies import evaluate_again

        fetched = None if champion is None else fetch_version(settings, champion)
        evaluate_again(
            settings,
            first,
            fetched,
            unfinished,
            judge=judge,
            spent=spent,
            calls=folder / f"{folder_of(folder, name, key).name}-calls.jsonl",
        )

    name = f"against-{'sft' if champion is None else champion}"
    # The key contains the full first report, because the candidate's answers or the judge may
    # change.
    places = {"samples": str(first.samples), "judgements": str(first.judgements)}
    key = {"first": as_json(report) | places, "alpha": alpha}
    again = make_once(folder, name, key, evaluate).path
    return replace(first, champion=champion, folder=str(again))


def _shown(champion: int | None) -> str:
    return "none" if champion is None else f"version {champion}"


def _promotion_of(version: int, state: Champions) -> Decision:
    """Return the decision that made a version the current champion."""
    promoted = (version, version)
    return [each for each in state.decisions if (each.version, each.champion) == promoted][-1]
