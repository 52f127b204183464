"""Log the data sets of a run as inputs of the MLflow run."""

import json
from collections.abc import Sequence

from mlflow.entities import Dataset, DatasetInput, InputTag
from mlflow.utils.mlflow_tags import MLFLOW_DATASET_CONTEXT

from pipeline.inputs.lineage import DataSet
from pipeline.tracking.mlflow_client import connect, explained


@explained()
def log_data(run_id: str, data: Sequence[DataSet]) -> None:
    """Log data sets as inputs of an MLflow run; repeated calls change nothing.

    Raises:
        ModelError: MLflow does not answer.
    """
    connect().log_inputs(run_id, [_input(one) for one in data])


def _input(one: DataSet) -> DatasetInput:
    dataset = Dataset(
        name=one.name,
        digest=one.digest,
        source_type="local",
        source=json.dumps({"uri": one.source}),
        profile=json.dumps({"num_rows": one.rows, "left_out": one.left_out}),
    )
    return DatasetInput(dataset, [InputTag(MLFLOW_DATASET_CONTEXT, one.name)])
