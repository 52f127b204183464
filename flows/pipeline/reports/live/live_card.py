"""Show a training, while it runs, on the Metaflow card of its step."""

import math
import time
from typing import Any

from metaflow.cards import Markdown

from pipeline.reports.card_components import card_components
from pipeline.reports.document import Document

CARD = "training"
"""Id of the card. Its decorator needs `refresh_interval=0`."""

CARD_SECONDS = 120.0
"""Minimum seconds between two cards. Metaflow starts one process to write a card, and another to
write its data."""

DATA_SECONDS = 10.0
"""Seconds from the start of writing a card until its data may be written."""


class LiveCard:
    """The card with the id CARD of the current step; without this card, nothing is shown."""

    def __init__(self, card: Any) -> None:
        """Store `card`, Metaflow's `current.card`; it is None if the step has no card."""
        self._card = card
        self._next = self._next_data = -math.inf

    def show(self, document: Document) -> None:
        """Write the card in the background, unless it was written less than CARD_SECONDS ago.

        A new list of components makes Metaflow write the whole card, which `card view` shows. A
        call at least DATA_SECONDS later writes the card's data. New data make a browser that still
        shows the previous card load the new card. Before the first card there is no card to
        replace, so no data are written after the first card.
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
        """Add a sentence to the card, which Metaflow writes when the step ends.

        The sentence must not contain text of models or data, because Markdown is not escaped.
        """
        if self._card is not None:
            self._card[CARD].append(Markdown(sentence))
