"""Withdraw the champion before a retraining if users like it less than the one before it."""

from collections.abc import Mapping
from typing import Any

from human_feedback.watch import watch_champion
from pipeline.stages.given_settings import read_settings


def watch_feedback(from_file: Mapping[str, Any], run: str) -> None:
    """Do nothing unless `promotion.withdraw_alpha` is set.

    Raises:
        DataError: no served answers are recorded.
        ModelError: MLflow does not answer, or somebody else decided meanwhile.
    """
    settings = read_settings(from_file, {}, ())
    alpha = settings.promotion.withdraw_alpha
    if alpha is not None:
        told = watch_champion(
            settings.registered_model, by=f"run {run}", alpha=alpha, withdraw=True
        )
        print(f"feedback: {told}", flush=True)
