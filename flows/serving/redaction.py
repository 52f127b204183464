"""Addresses as they may be shown to people."""

import re


def without_credentials(text: object) -> str:
    """A text whose addresses have no user, no password and no query."""
    return re.sub(r"://(?:[^/?#\s]*@)?([^?\s]*)(?:\?\S*)?", r"://\1", str(text))
