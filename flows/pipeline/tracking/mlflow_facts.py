"""Facts about MLflow, for modules that do not import it."""

import os

from ppo_core.errors.redaction import redact

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
"""Address of the database, in the working directory, if MLFLOW_TRACKING_URI is not set."""

MAX_PARAM_CHARACTERS = 6000
"""Maximum length of the value of a parameter."""

MAX_TAG_CHARACTERS = 8000
"""Maximum length of the value of a tag."""


def shown_server() -> str:
    """Return the address of MLflow's server or database, without secrets."""
    return redact(os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_TRACKING_URI))
