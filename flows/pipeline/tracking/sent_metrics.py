"""Skip metrics that MLflow has already, from a machine that was lost with its journal."""

from pipeline.tracking.journal import Journal
from pipeline.tracking.mlflow_client import connect, explained


@explained()
def remember_sent_metrics(journal: Journal, run: str) -> None:
    """Make the journal skip the metrics that MLflow has of a run, so that none is sent twice.

    Raises:
        ModelError: MLflow does not answer.
    """
    client = connect()
    for name in client.get_run(run).data.metrics:
        for metric in client.get_metric_history(run, name):
            journal.remember_metric(run, metric.step, name)
