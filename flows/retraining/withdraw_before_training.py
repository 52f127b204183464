"""Withdraw the champion before a retraining if users like it less than the previous champion."""

from collections.abc import Mapping
from typing import Any

from human_feedback.withdraw_champion import watch_champion
from pipeline.stages.given_settings import read_settings
from ppo_core.errors import DataError


def watch_feedback(from_file: Mapping[str, Any], run: str) -> None:
    """Withdraw the champion if users like it less than the previous champion; print the result.

    Do nothing unless `promotion.withdraw_alpha` is set. If no served answers are recorded, print
    that the two champions were not compared.

    Raises:
        ModelError: MLflow does not answer, or somebody else decided meanwhile.
    """
    settings = read_settings(from_file, {}, ())
    alpha = settings.promotion.withdraw_alpha
    if alpha is None:
        return
    try:
        told = watch_champion(
            settings.registered_model, by=f"run {run}", alpha=alpha, withdraw=True
        )
    except DataError as error:
        # A service that does not record its answers must not prevent the training.
        told = f"not compared: {error}"
    print(f"feedback: {told}", flush=True)
