"""Public import path for services: `from flows.champion import load_champion`."""

from .serving.champion import Champion, champion_version, load_champion

__all__ = ["Champion", "champion_version", "load_champion"]
