"""Public import path for services: `from flows.champion import load_champion`.

Import it as `flows.champion`: it is no module by itself.
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
