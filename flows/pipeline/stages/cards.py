"""Return the reports as components of Metaflow cards."""

from collections.abc import Sequence
from typing import Any

from metaflow.cards import MetaflowCardComponent

from pipeline.inputs.flow_run import FlowRun
from pipeline.reports.card_components import card_components
from pipeline.reports.evaluation_report import evaluation_document
from pipeline.reports.promotion_report import promotion_document
from pipeline.reports.reward_model_report import reward_document
from pipeline.results.step_records import (
    EvaluatedPolicy,
    RegisteredPolicy,
    ValidatedReward,
)
from pipeline.settings.gate_configs import PromotionConfig
from pipeline.stages.tracked import with_files


@with_files("validation")
def reward_model_card(validation: ValidatedReward, run: FlowRun) -> list[MetaflowCardComponent]:
    """Return the components of the card about a reward model."""
    return card_components(reward_document(validation.report()))


@with_files("evaluation")
def evaluation_card(
    evaluation: EvaluatedPolicy, warnings: Sequence[str], run: FlowRun
) -> list[MetaflowCardComponent]:
    """Return the components of the card about an evaluation."""
    return card_components(evaluation_document(evaluation.report(), warnings))


@with_files("registered")
def promotion_card(
    registered: RegisteredPolicy, validation: ValidatedReward, limits: PromotionConfig, run: FlowRun
) -> list[MetaflowCardComponent]:
    """Return the components of the card about a promotion decision."""
    document = promotion_document(
        registered,
        registered.evaluation.report(),
        limits,
        reward_model_fit=validation.fit if validation.is_used else None,
    )
    return card_components(document)


def write_card_now(card: Any) -> None:
    """Write `current.card` now, because Metaflow writes no card for a step that raises an error.

    The card needs `refresh_interval=0`. The first call starts a process that writes the card, and
    the second call waits for that process.
    """
    card.refresh()
    card.refresh(force=True)
