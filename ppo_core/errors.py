"""Exceptions of this project."""

from ppo_core.redaction import redact


class PPOError(Exception):
    """Base of the exceptions of this project, whose messages hold no password, key or token."""

    def __init__(self, *args: object) -> None:
        """Take the message, which may quote addresses and the messages of libraries."""
        super().__init__(*(redact(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(PPOError, ValueError):
    """A setting, or a combination of settings, is invalid."""


class DataError(PPOError, ValueError):
    """A data set, a column or a row cannot be used."""


class ModelError(PPOError, ValueError):
    """A model or tokenizer cannot be used in its role."""


class TrainingError(PPOError, RuntimeError):
    """Training cannot continue, for example after repeated non-finite losses."""


class RunInterruptedError(PPOError, RuntimeError):
    """Training was stopped by a signal and can resume from its last checkpoint."""


class ProcessError(PPOError, RuntimeError):
    """A process of a run died or stopped responding; a retry resumes from the last checkpoint."""


class JudgeError(PPOError, RuntimeError):
    """An LLM judge cannot be called, or its budget is spent."""
