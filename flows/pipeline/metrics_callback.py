"""The metrics of a training, to the log of its run after every update."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pipeline.run_log import RunLog


class MetricsCallback(TrainerCallback):
    """Logs all numbers that a trainer logs, from the main process, at the trainer's step."""

    def __init__(self, log: RunLog) -> None:
        """Log to `log`."""
        self._log = log

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float | None],
        **kwargs: Any,
    ) -> None:
        """Log what has a value; `epoch` has none while nobody counts."""
        if state.is_world_process_zero:
            numbers = {name: value for name, value in logs.items() if value is not None}
            self._log.log_metrics(numbers, step=state.global_step)
