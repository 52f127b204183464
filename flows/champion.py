"""The import path of a service: `from flows.champion import load_champion`."""

from .serving.champion import Champion, champion_version, load_champion

__all__ = ["Champion", "champion_version", "load_champion"]
