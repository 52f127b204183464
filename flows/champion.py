"""Public import path for services: `from flows.champion import load_champion`.

Import this module as `flows.champion`: the relative import below fails if the module is imported as
`champion`.
"""

from .serving.champion import (
    ABANDONED_SECONDS,
    CACHE,
    Champion,
    Fetched,
    champion_version,
    fetch_champion,
    load_champion,
)

__all__ = [
    "ABANDONED_SECONDS",
    "CACHE",
    "Champion",
    "Fetched",
    "champion_version",
    "fetch_champion",
    "load_champion",
]
