"""Folders that tests read."""

from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
"""The project."""

SHARED = ROOT.parent / "shared" / "data"
"""Models and data beside the project, where they are."""
