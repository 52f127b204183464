"""The part of a model's configuration that describes its text decoder."""

from typing import Any


def text_config(config: Any) -> Any:
    """Return the part of a configuration that describes the model that reads and writes text.

    A model of text and images nests it; for a model of text alone it is the configuration itself.
    """
    return config.get_text_config(decoder=True)
