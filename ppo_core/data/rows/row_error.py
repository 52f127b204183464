"""The error of a row that is left out."""


class RowError(ValueError):
    """A row cannot be used; the message completes "12 rows ...", as in "with an empty prompt"."""

    def __init__(self, reason: str, move: str = "Correct or remove these rows.") -> None:
        """Take the reason, which counts as one for all rows with this text, and the next move."""
        super().__init__(reason)
        self.move = move
