"""Skip metrics that were already sent by a machine that was lost together with its journal."""

from pipeline.tracking.journal import Journal
from pipeline.tracking.mlflow_client import connect, explained


@explained()
def remember_sent_metrics(journal: Journal, run: str) -> None:
    """Make the journal skip the metrics of a run that MLflow already has.

    Raises:
        ModelError: MLflow does not answer.
    """
    client = connect()
    for name in client.get_run(run).data.metrics:
        for metric in client.get_metric_history(run, name):
            journal.remember_metric(run, metric.step, name)
