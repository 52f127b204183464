"""The card of a step that trains, which shows the training while it runs."""

import math
import time
from typing import Any

from metaflow.cards import Markdown

from pipeline.reports.card_components import card_components
from pipeline.reports.document import Document

CARD = "training"
"""Id of the card. It needs `refresh_interval=0`."""

CARD_SECONDS = 120.0
"""Least time between two cards. Metaflow starts a process for a card, and another for its data."""

DATA_SECONDS = 10.0
"""Time after which a card is written, and its data may be."""


class LiveCard:
    """The card with the id CARD of the current step; without such a card, nothing is shown."""

    def __init__(self, card: Any) -> None:
        """Show documents on `current.card`; None if the step has no card."""
        self._card = card
        self._next = self._next_data = -math.inf

    def show(self, document: Document) -> None:
        """Write the card in the background, unless it was written less than CARD_SECONDS ago.

        A new list of components makes Metaflow write the whole card, which `card view` shows. The
        data, which a later call writes, tell Metaflow's pages to load the card again; the first
        card needs none.
        """
        now = time.monotonic()
        if self._card is None:
            return
        if now >= self._next:
            self.keep(document)
            self._card[CARD].refresh()
            is_first = self._next == -math.inf
            self._next = now + CARD_SECONDS
            self._next_data = self._next if is_first else now + DATA_SECONDS
        elif now >= self._next_data:
            self._card[CARD].refresh()
            self._next_data = self._next

    def keep(self, document: Document) -> None:
        """Make a document the content of the card; Metaflow writes the card when the step ends."""
        if self._card is not None:
            self._card[CARD] = card_components(document)

    def say(self, sentence: str) -> None:
        """Add a fixed sentence to the card, which Metaflow writes when the step ends."""
        if self._card is not None:
            self._card[CARD].append(Markdown(sentence))
