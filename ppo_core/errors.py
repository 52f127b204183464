"""What can go wrong, as a small tree: catch `PPOError` to catch all of it."""


class PPOError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(PPOError, ValueError):
    """A setting, or a combination of settings, cannot work."""


class DataError(PPOError, ValueError):
    """A data set, a column or a row cannot be used."""


class ModelError(PPOError, ValueError):
    """A model or tokenizer cannot play the part it was given."""


class TrainingError(PPOError, RuntimeError):
    """Training reached a state that it must not continue from."""


class RunInterruptedError(PPOError, RuntimeError):
    """Training was told to stop, and can go on from its last checkpoint."""


class ProcessError(PPOError, RuntimeError):
    """A process of a training has died or frozen; the next one goes on from the checkpoint."""


class JudgeError(PPOError, RuntimeError):
    """A judge cannot be asked, or may not be asked more."""
