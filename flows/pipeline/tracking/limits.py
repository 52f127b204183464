"""Limits of MLflow, for modules that do not import it."""

MAX_PARAM_CHARACTERS = 6000
"""Maximum length of the value of a parameter."""

MAX_TAG_CHARACTERS = 8000
"""Maximum length of the value of a tag."""
