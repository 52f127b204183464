"""The reports as Metaflow cards.

Metaflow's Markdown passes HTML and links through to the browser, so it gets headings in our own
words and nothing else. Tables, value boxes and the labels of images show text as it is: whatever a
model or a data set wrote goes into these.
"""

from collections.abc import Mapping
from typing import Any

from metaflow.cards import Image, Markdown, MetaflowCardComponent, Table, ValueBox

from pipeline.reports.document import Document, Section
from pipeline.reports.evaluation import evaluation_document
from pipeline.reports.promotion import promotion_document
from pipeline.reports.reward_model import reward_document
from pipeline.settings.promotion_config import PromotionConfig


def reward_model_card(report: Mapping[str, Any]) -> list[MetaflowCardComponent]:
    """The components of the card of a reward model's report."""
    return _components(reward_document(report))


def evaluation_card(evaluation: Mapping[str, Any]) -> list[MetaflowCardComponent]:
    """The components of the card of an evaluation's result."""
    return _components(evaluation_document(evaluation))


def promotion_card(
    promotion: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    validation: Mapping[str, Any],
    limits: PromotionConfig,
    *,
    kl: float,
) -> list[MetaflowCardComponent]:
    """The components of the card of a decision, see `promotion_document`."""
    return _components(promotion_document(promotion, evaluation, validation, limits, kl=kl))


def _components(document: Document) -> list[MetaflowCardComponent]:
    return [
        ValueBox(title=document.subject, value=document.verdict, theme=document.tone),
        Table([[reason] for reason in document.reasons], headers=["Why"]),
        *(part for section in document.sections for part in _section(section)),
    ]


def _section(section: Section) -> list[MetaflowCardComponent]:
    return [
        Markdown(f"## {section.title}"),
        Table([list(row) for row in section.rows], headers=list(section.headers)),
        *(Image(plot.png, plot.shows) for plot in section.plots),
    ]
