"""Judge the trained policy's answers against SFT, the champion, and any references."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.evaluation.evaluate_policies import evaluate_policies, judge_of_run
from pipeline.evaluation.policy_selection import choose_policy, divergence_limit
from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.model_digests import require_recorded, require_unchanged
from pipeline.inputs.run_data import RunData
from pipeline.judges.judge_budget import Budget, Payment, spent_by
from pipeline.judges.make_judge import make_judge_of_run
from pipeline.judges.verdict import JudgedPrompt
from pipeline.registry.alpha_spending import limits_now
from pipeline.reports.log_reports import log_evaluation
from pipeline.results.evaluation import Evaluation, TrainedJudge
from pipeline.results.selection import Selection
from pipeline.results.step_records import (
    EvaluatedPolicy,
    FetchedChampion,
    PreparedModel,
    TrainedPolicy,
)
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import stage
from pipeline.storage.cached_results import MadeModel, as_values, make_or_reuse
from pipeline.tracking.tracker import Tracker
from ppo_core.distributed.process import large_imports
from ppo_core.io.folder_cache import digest_of, digest_of_code
from ppo_core.io.imported_modules import imported_modules
from ppo_core.io.validation import read_record
from ppo_core.reporting.diagnosis import judged_worse

if TYPE_CHECKING:
    from pipeline.evaluation.baselines import Score
    from pipeline.evaluation.pair_accuracy import Array

CODE_OF_CHOICE = "pipeline.evaluation.policy_selection"
"""Module whose code, with the code of its imports, determines the choice of the policy."""

SELECTED = "selected-policy"
"""Name of the chosen policy, and first part of the name of its folder in the cache."""


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """What the cache stores about a chosen policy, besides the policy's files."""

    selection: Selection
    payment: Payment | None = None


@stage("evaluate_win_rate", "settings", "sft", "judge", patient=True)
def evaluate_win_rate(
    tracker: Tracker,
    settings: Settings,
    sft: PreparedModel,
    policy: TrainedPolicy,
    champion: FetchedChampion | None,
    judge: TrainedJudge | None,
    run: FlowRun,
    reward_model: PreparedModel | None = None,
) -> tuple[TrainedPolicy, EvaluatedPolicy]:
    """Choose the policy, judge its answers, and log the report.

    Return the chosen policy and the evaluation. If `reward_model` is None, the evaluation has no
    baselines, because the reward model of the run scores the samples of the baselines.

    Raises:
        ModelError: the files of the policy were changed after training, or those of `sft` after the
            run read them.
    """
    require_recorded(sft.path, sft.digest, "policy before PPO")
    champion, policy = fetch_again(settings, champion), policy.fetched(run.workspace)
    require_unchanged(policy.path, policy.digest, "The trained policy")
    made, selection = _choose(tracker, settings, sft, policy, judge, run)
    chosen = replace(policy, earlier=None)
    if made is not None:
        chosen = replace(chosen, path=made.place, digest=made.digest)
    path = run.workspace.fetch(chosen.path)
    folder = run.folder / "evaluation"
    folder.mkdir(exist_ok=True)
    evaluation = evaluate_policies(
        _with_limits_now(settings),
        sft.path,
        path,
        champion,
        folder,
        judge=judge,
        selection=selection,
        score=None if reward_model is None else _score_by(settings, reward_model, policy, run),
        calls=run.folder / "evaluation-calls.jsonl",
    )
    log_evaluation(tracker, evaluation)
    return with_judgment(chosen, evaluation.report()), evaluation


def with_judgment(policy: TrainedPolicy, evaluation: Evaluation) -> TrainedPolicy:
    """Return the policy; if the judge contradicts the gain in reward, add a warning."""
    scores, rate = policy.objective["objective/scores"], evaluation.against_sft
    found = judged_worse(scores.first, scores.last, (rate.rate, rate.low, rate.high))
    return replace(policy, warnings=[*policy.warnings, *map(str, found)])


def _score_by(
    settings: Settings, reward_model: PreparedModel, policy: TrainedPolicy, run: FlowRun
) -> "Score":
    """Return a function that scores answers with the last reward model of PPO."""
    place = policy.rounds[-1].path if policy.rounds else reward_model.path

    def score(prompts: Sequence[JudgedPrompt], texts: Sequence[str]) -> "Array":
        from pipeline.reward_validation.scores import require_finite
        from pipeline.stages.validation import load_scorer

        scorer = load_scorer(RunData(settings), run.workspace.fetch(place))
        scores = scorer.score_texts(prompts, texts)
        require_finite(scores, "samples of SFT")
        return scores

    return score


def _with_limits_now(settings: Settings) -> Settings:
    """Return the settings with the `alpha` of the next decision.

    With a `false_promotion_rate`, `alpha` depends on the earlier decisions.
    """
    if settings.promotion.false_promotion_rate is None:
        return settings
    # Imported here, because the import loads MLflow, which a short step does not need.
    with large_imports():
        from pipeline.registry.change_champion import read_decisions
    decisions = read_decisions(settings.registered_model)
    return replace(settings, promotion=limits_now(settings.promotion, decisions))


def _choose(
    tracker: Tracker,
    settings: Settings,
    sft: PreparedModel,
    trained: TrainedPolicy,
    trained_judge: TrainedJudge | None,
    run: FlowRun,
) -> tuple[MadeModel | None, Selection | None]:
    """Choose one of PPO's policies; for equal inputs, reuse the choice in the cache.

    The returned model is None if the policy at the end of PPO was chosen.
    """
    if settings.selection.method == "last":
        return None, None
    data, judge, earlier = RunData(settings), None, trained.earlier
    budget = Budget.of(settings.judging, run.folder / f"{SELECTED}-calls.jsonl")
    if settings.selection.method == "judge":
        judge = make_judge_of_run(settings, judge_of_run(settings, trained_judge), budget)
    ppo = settings.ppo
    inputs = {
        "start": sft.digest,
        "end": trained.digest,
        "earlier": earlier and earlier.digest,
        "prompts": digest_of(data.selection_prompts()),
        "prompt_format": settings.prompt_format,
        "sampling": [ppo.response_length, ppo.stop_token, ppo.stop_token_id, settings.precision],
        "temperature": settings.evaluation.temperature,
        "selection": asdict(settings.selection),
        "limit": divergence_limit(settings),
        "seed": settings.seed,
        "judge": judge and [judge.name, judge.version],
        "code": digest_of_code(*imported_modules(CODE_OF_CHOICE)),
    }

    def choose(folder: Path) -> dict[str, Any]:
        path = None
        if earlier is not None:
            require_unchanged(earlier.path, earlier.digest, "The folder of the earlier policies")
            path = Path(earlier.path)
        selection = choose_policy(data, sft.path, trained.path, judge, folder, earlier=path)
        payment = Payment(run=run.id, spent=budget.spent({}))
        return as_values(_Choice(selection=selection, payment=payment))

    made = make_or_reuse(run.workspace, SELECTED, inputs, choose)
    choice = read_record(made.values, _Choice)
    selection = replace(choice.selection, spent=spent_by(run.id, choice.payment))
    print(f"{SELECTED}: {selection}", flush=True)
    metrics = {"selection/weight": selection.weight, "selection/max_kl": selection.limit}
    if selection.update is not None:
        metrics["selection/update"] = float(selection.update)
    tracker.parent.log_figures(metrics)
    return (None if selection.is_end else made), selection


def fetch_again(settings: Settings, champion: FetchedChampion | None) -> FetchedChampion | None:
    """Return the champion that an earlier step fetched, or the current one if its files are gone.

    The files are gone if this step runs on another machine, or if somebody emptied the cache.

    Raises:
        DataError: see `find_champion`.
        ModelError: see `find_champion`.
    """
    if champion is None or Path(champion.model).is_dir():
        return champion
    # Imported here, because the import loads MLflow, which a short step does not need.
    with large_imports():
        from pipeline.promotion.fetch_champion import find_champion
    return find_champion(settings)
