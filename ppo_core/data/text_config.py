"""The part of a model's configuration that describes its text decoder."""

from typing import Any


def text_config(config: Any) -> Any:
    """Return the part of a model's configuration that describes the text decoder.

    In a text-and-image model, this part is nested. In a text-only model, this part is the whole
    configuration.
    """
    return config.get_text_config(decoder=True)
