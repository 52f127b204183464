"""The metrics of a training, a line of JSON for each time that they are logged."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class MetricsFile(TrainerCallback):
    """Appends every log to a file, from the main process; a new run starts a new file."""

    def __init__(self, path: Path) -> None:
        """Write to `path`, whose folder is there."""
        self._path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start anew, unless an earlier run is continued."""
        if state.is_world_process_zero and state.global_step == 0:
            self._path.write_text("", encoding="utf-8")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **kwargs: Any,
    ) -> None:
        """Write one line."""
        if state.is_world_process_zero:
            with self._path.open("a", encoding="utf-8") as file:
                print(json.dumps(logs), file=file)
