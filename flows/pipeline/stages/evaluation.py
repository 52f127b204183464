"""Judge the trained policy's answers against SFT, the champion, and any references."""

from pathlib import Path

from pipeline.evaluation.evaluate_policies import evaluate_policies
from pipeline.inputs.flow_run import FlowRun
from pipeline.inputs.model_digests import require_unchanged
from pipeline.reports.log_reports import log_evaluation
from pipeline.results.evaluation import TrainedJudge
from pipeline.results.step_records import (
    EvaluatedPolicy,
    FetchedChampion,
    PreparedModel,
    TrainedPolicy,
)
from pipeline.settings.settings import Settings
from pipeline.stages.tracked import stage
from pipeline.tracking.tracker import Tracker
from ppo_core.distributed.process import large_imports


@stage("evaluate_win_rate", "settings", "sft", "policy", "judge", patient=True)
def evaluate_win_rate(
    tracker: Tracker,
    settings: Settings,
    sft: PreparedModel,
    policy: TrainedPolicy,
    champion: FetchedChampion | None,
    judge: TrainedJudge | None,
    run: FlowRun,
) -> EvaluatedPolicy:
    """Judge the policy's answers, and log the report.

    Raises:
        ModelError: the files of the policy were changed after training.
    """
    champion = fetch_again(settings, champion)
    require_unchanged(policy.path, policy.digest, "The trained policy")
    folder = run.folder / "evaluation"
    folder.mkdir(exist_ok=True)
    evaluation = evaluate_policies(settings, sft.path, policy.path, champion, folder, judge=judge)
    log_evaluation(tracker, evaluation)
    return evaluation


def fetch_again(settings: Settings, champion: FetchedChampion | None) -> FetchedChampion | None:
    """Return the champion of an earlier step, or the current one if its files are gone.

    They are gone if this step runs on another machine, or if somebody emptied the cache.

    Raises:
        DataError: see `find_champion`.
        ModelError: see `find_champion`.
    """
    if champion is None or Path(champion.model).is_dir():
        return champion
    # Imported here: it imports MLflow, which a short step does without.
    with large_imports():
        from pipeline.promotion.champion import find_champion
    return find_champion(settings)
