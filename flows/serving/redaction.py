"""Remove credentials from addresses before they are shown."""

import re


def without_credentials(text: object) -> str:
    """Return `text`, with user, password and query removed from every URL."""
    return re.sub(r"://(?:[^/?#\s]*@)?([^?\s]*)(?:\?\S*)?", r"://\1", str(text))
