"""Old path of the records in `pipeline.results`."""

# A resumed run reads records that an earlier version pickled with this path.
from pipeline.results.evaluation import TrainedJudge
from pipeline.results.step_records import (
    Change,
    EvaluatedPolicy,
    FetchedChampion,
    PreparedModel,
    RegisteredPolicy,
    TrainedPolicy,
    ValidatedReward,
)

__all__ = [
    "Change",
    "EvaluatedPolicy",
    "FetchedChampion",
    "PreparedModel",
    "RegisteredPolicy",
    "TrainedJudge",
    "TrainedPolicy",
    "ValidatedReward",
]
