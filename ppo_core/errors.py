"""The exceptions that this project raises; `PPOError` is the base of all."""


class PPOError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(PPOError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class DataError(PPOError, ValueError):
    """A data set, a column or a row cannot be used."""


class ModelError(PPOError, ValueError):
    """A model or tokenizer cannot be used in its role."""


class TrainingError(PPOError, RuntimeError):
    """Training reached a state that it must not continue from."""


class RunInterruptedError(PPOError, RuntimeError):
    """Training was told to stop, and can resume from its last checkpoint."""


class ProcessError(PPOError, RuntimeError):
    """A process of a run died or froze; a new attempt resumes from the last checkpoint."""


class JudgeError(PPOError, RuntimeError):
    """A judge cannot be called, or its budget is spent."""
