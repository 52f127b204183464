"""The loop of supervised training: optimizer steps, lines of metrics, and checkpoints."""

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm
from transformers import get_scheduler

from ppo_core.checkpointing.checkpointer import Checkpointer, SavePlan
from ppo_core.checkpointing.fingerprint import Fingerprint, fingerprint
from ppo_core.checkpointing.state_form import SUPERVISED_FORMS
from ppo_core.checkpointing.training_state import TrainingState
from ppo_core.distributed.engine import Engine
from ppo_core.distributed.interruption import Interruption
from ppo_core.errors import NotFiniteError, RunInterruptedError
from ppo_core.errors.out_of_memory import explained_out_of_memory
from ppo_core.io.progress_bar import progress
from ppo_core.io.random_state import seed_global_generators
from ppo_core.models.adapters import adapter_settings, train_adapters
from ppo_core.models.backbones import DecoderBackbone, freeze_unread_parts
from ppo_core.models.kernels.cpu_memory import release_freed_memory
from ppo_core.reporting.metrics_file import MetricsFile
from ppo_core.supervised.checkpoint import Progress, SupervisedContents
from ppo_core.supervised.lora import keep_frozen_in_bf16
from ppo_core.supervised.step_order import StepOrder, passes_of_step
from ppo_core.supervised.supervised_config import SupervisedConfig

if TYPE_CHECKING:
    from peft import PeftModel

MAX_GRAD_NORM = 1.0
"""Norm to which the gradient of a step is clipped."""

MOST_LINES = 500
"""Maximum number of lines in the metrics file.

In a longer training, a line has the means over several steps, `grad_norm` of the last of these
steps, and `lr` of the next step."""

TIMEOUT = 1800
"""Seconds that a process waits for the other processes."""

LESS_MEMORY = (
    "Lower batch_size and raise gradient_accumulation_steps by the same factor, set "
    "gradient_checkpointing=True, or start several processes with sharding=zero2, zero3 or fsdp2, "
    "and with offload=True if that is not enough; such a training can resume. Or train LoRA "
    "adapters, or lower max_length, in a new output_dir."
)
"""Advice in the error of a training that ran out of memory."""

Batch = dict[str, Tensor]


class SummedLoss(Protocol):
    """A module whose forward pass takes a batch's tensors by name.

    The forward pass returns the loss, weighted and summed over the units that count (tokens or
    pairs), and the sums of `metrics` over the same units.
    """

    backbone: DecoderBackbone | None
    """The trained backbone; None if the module calls the model's own forward pass."""

    metrics: Sequence[str]
    """Names of the metrics other than the loss."""

    def units(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number () of units of a batch: tokens, or pairs."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Encoded rows, and how they become batches."""

    rows: Dataset
    """Encoded rows; the column `length` has the number of tokens of a row's longest text."""

    digest: str
    """Digest of the rows."""

    collate: Callable[[Any], Batch]
    """Function that makes a batch from encoded rows."""

    texts_per_row: int
    """Number of texts in a row: 1, or 2 for a pair."""


class TrainingLoop:
    """Trains a module in place; all processes must call the methods."""

    def __init__(
        self,
        module: Any,
        data: TrainingData,
        config: SupervisedConfig,
        description: str,
        *,
        adapted: "PeftModel | None" = None,
        engine: Engine,
        output_dir: Path | None,
    ) -> None:
        """Prepare the module, its optimizer, and the files of the training.

        Args:
            module: a `SummedLoss` that is a torch module.
            data: the rows to train on.
            config: the settings; their learning rate must be a number.
            description: name of the training in the progress bar.
            adapted: the model with adapters in `module`, if there is one.
            engine: connection to the other processes.
            output_dir: folder for metrics and checkpoints; None writes neither.

        Raises:
            ConfigError: a setting of the sharding contradicts another.
        """
        freeze_unread_parts(module)
        self._objective: SummedLoss = module
        self._data, self._config, self._description = data, config, description
        self._engine, self._output_dir = engine, output_dir
        # The slice reads the column at once. Without the slice, each number would be read from disk
        # on its own.
        self._order = StepOrder.of(data.rows["length"][:], config)
        start = Fingerprint(
            settings=identity_of(config, data) | {"steps": self._order.steps},
            models={"model": fingerprint(module)},
        )
        if adapted is not None:
            start.models["adapter"] = adapter_settings(adapted.peft_config[adapted.active_adapter])
            # Round only now: the fingerprint must be the same on a machine that computes in fp32.
            keep_frozen_in_bf16(adapted, engine)
        optimizer = make_optimizer(module, config)
        warmup = math.ceil(config.warmup_ratio * self._order.steps)
        scheduler = get_scheduler("linear", optimizer, warmup, self._order.steps)
        set_mode(module, adapted, recomputes=config.gradient_checkpointing)
        self._module, self._optimizer = engine.prepare(module, optimizer)
        # Each process draws its own dropout.
        seed_global_generators(config.seed + engine.rank)
        self._scheduler = scheduler
        self._progress = Progress()
        self._trains_adapter = adapted is not None
        self._interruption = Interruption()
        self._metrics_file = MetricsFile(output_dir) if output_dir and engine.is_main else None
        self._checkpoints: Checkpointer | None = None
        if output_dir is not None:
            training = TrainingState(
                engine=engine,
                module=self._module,
                optimizer=self._optimizer,
                scheduler=scheduler,
                fingerprint=start,
            )
            contents = SupervisedContents(training=training, progress=self._progress)
            plan = SavePlan(
                folder=output_dir,
                saves=config.save_steps > 0,
                keep=config.save_total_limit,
                timeout=TIMEOUT,
            )
            self._checkpoints = Checkpointer(contents, plan, SUPERVISED_FORMS)

    def train(
        self, resume: str | Path | bool | None = None, *, anyway: bool = False
    ) -> dict[str, float]:
        """Run all remaining steps; for the arguments see `Checkpointer.start`.

        Returns:
            Metrics: "loss" (mean over the last tenth of the steps), "rows", "steps" (optimizer
            steps), "seconds" (of this process) and "learning_rate".

        Raises:
            ConfigError: output_dir cannot be created; or the training saves checkpoints, `resume`
                is off, and output_dir contains checkpoints of an earlier training.
            RunInterruptedError: a process received SIGTERM; a checkpoint was written if the
                training saves checkpoints.
            TrainingError: the loss is not finite, memory is full, or the checkpoint does not fit.
        """
        started = time.monotonic()
        with self._interruption, explained_out_of_memory(LESS_MEMORY):
            if self._checkpoints is not None:
                self._checkpoints.start(resume, anyway=anyway)
            if self._metrics_file is not None:
                done, every = self._progress.steps, self._steps_per_line
                first = self._order.steps % every or every
                self._metrics_file.cut_back(done, first=first, every=every)
            self._run_steps()
        return {
            "loss": self._progress.tail / self._tail_steps,
            "rows": len(self._data.rows),
            "steps": self._order.steps,
            "seconds": time.monotonic() - started,
            "learning_rate": float(self._config.learning_rate or 0.0),
        }

    @property
    def _steps_per_line(self) -> int:
        return math.ceil(self._order.steps / MOST_LINES)

    @property
    def _tail_steps(self) -> int:
        """Number of steps in the last tenth."""
        return math.ceil(self._order.steps / 10)

    def _run_steps(self) -> None:
        order, done = self._order, self._progress.steps
        hidden = not self._engine.is_main
        with progress(order.rows, self._description, "row", hidden=hidden) as bar:
            bar.update(order.rows_of_steps(done))
            for epoch in range(done // order.steps_per_epoch, order.epochs):
                steps = order.epoch(epoch)
                for rows in steps[self._progress.steps - epoch * order.steps_per_epoch :]:
                    self._stop_if_interrupted()
                    loss = self._step(rows, bar)
                    self._save_if_due()
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

    def _step(self, rows: list[int], bar: tqdm) -> float:
        """Take one optimizer step on rows of the data, count it, and return its mean loss.

        The bar advances with each pass.
        """
        batches = self._own_batches(rows)
        engine, module = self._engine, self._module
        own_units = sum((self._objective.units(batch) for batch in batches), torch.zeros(()))
        units = float(engine.sum(own_units.double().cpu()))
        sums = torch.zeros(1 + len(self._objective.metrics), dtype=torch.float64)
        for number, batch in enumerate(batches):
            if self._trains_adapter and engine.device.type == "cpu":
                release_freed_memory()
            # Divide the weights: dividing the loss would copy the gradients of the LM head.
            batch["weights"] /= units or 1.0  # 0 units: all rows of the step have the weight 0
            with (
                engine.accumulate_only(module, number < len(batches) - 1),
                self._matmuls(batch["input_ids"]),
            ):
                loss, metrics = module(**batch)
                engine.backward(loss)
            sums += torch.cat([loss.detach().view(1) * units, metrics]).double().cpu()
            done, before = (len(rows) * n // len(batches) for n in (number + 1, number))
            bar.update(done - before)
        norm = float(engine.step(module, self._optimizer, MAX_GRAD_NORM))
        sums = engine.sum(sums)
        self._scheduler.step()
        return self._count_step([*sums.tolist(), units], norm)

    def _matmuls(self, ids: Tensor) -> AbstractContextManager[None]:
        """Return the context of a pass of token ids (..., S), see `DecoderBackbone.products`."""
        backbone = self._objective.backbone
        return nullcontext() if backbone is None else backbone.products(ids.flatten(0, -2))

    def _own_batches(self, rows: list[int]) -> list[Batch]:
        """Return this process's batches of a step; all processes have the same number of them.

        The processes divide the rows of a pass, which have similar lengths. A process that gets no
        row takes the shortest row of the pass, with weight 0.
        """
        engine, data = self._engine, self._data
        parts = passes_of_step(
            [data.texts_per_row * self._order.lengths[row] for row in rows],
            self._config.batch_size,
            device=engine.device,
            processes=engine.num_processes,
        )
        own = [part[engine.rank :: engine.num_processes] for part in parts]
        passed = [rest or part[-1:] for rest, part in zip(own, parts, strict=True)]
        encoded = iter(data.rows.__getitems__([rows[n] for part in passed for n in part]))
        batches = []
        for part, counted in zip(passed, own, strict=True):
            batch = data.collate(list(itertools.islice(encoded, len(part))))
            batch["weights"] = float(bool(counted)) * batch.get("weights", torch.ones(len(part)))
            batches.append({name: t.to(engine.device) for name, t in batch.items()})
        return batches

    def _count_step(self, sums: list[float], norm: float) -> float:
        """Count a step with its sums of losses, metrics and units; write a line if it is due.

        Return the mean loss.

        Raises:
            NotFiniteError: the loss or the norm of its gradient is not finite.
        """
        state, total = self._progress, self._order.steps
        state.steps += 1
        loss = sums[0] / (sums[-1] or 1.0)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NotFiniteError(
                f"The loss is {loss} at step {state.steps}, and the norm of its gradient {norm}, "
                "so the weights are unusable and were not saved. Lower learning_rate, and check "
                "the initial model for weights that are not finite."
            )
        if state.steps > total - self._tail_steps:
            state.tail += loss
        state.line = [a + b for a, b in zip(state.line or [0.0] * len(sums), sums, strict=True)]
        if (total - state.steps) % self._steps_per_line == 0:
            self._write_line(norm)
        return loss

    def _write_line(self, norm: float) -> None:
        *sums, units = self._progress.line
        self._progress.line = []
        if self._metrics_file is not None:
            names = ["loss", *self._objective.metrics]
            metrics = {
                name: value / (units or 1.0) for name, value in zip(names, sums, strict=True)
            }
            metrics |= {"grad_norm": norm, "lr": float(self._scheduler.get_last_lr()[0])}
            self._metrics_file.append(self._progress.steps, metrics)

    def _save_if_due(self) -> None:
        if self._checkpoints is None or not self._config.save_steps:
            return
        self._checkpoints.check_writer()
        asked = self._config.save_steps
        every = int(asked) if asked >= 1 else math.ceil(asked * self._order.steps)
        if self._progress.steps % every == 0:
            self._checkpoints.save()

    def _stop_if_interrupted(self) -> None:
        """Save and stop all processes if any process received SIGTERM.

        Raises:
            RunInterruptedError: a process received SIGTERM; raised in all processes.
        """
        if not self._engine.any(self._interruption.requested):
            return
        next_move = "No checkpoint was saved, because save_steps=0."
        if self._checkpoints is None:
            next_move = "It was a trial of the learning-rate search, which starts again next time."
        elif self._config.save_steps:
            self._checkpoints.save()
            next_move = (
                f"To resume from the checkpoint in '{self._output_dir}', start the training again "
                "with --resume_from_checkpoint latest."
            )
        raise RunInterruptedError(
            f"The training stopped after SIGTERM, with {self._progress.steps} of "
            f"{self._order.steps} steps done. {next_move}"
        )


def identity_of(config: SupervisedConfig, data: TrainingData) -> dict[str, Any]:
    """Return the settings that change the result, and a digest of the rows.

    A resumed training must share both.
    """
    return config.settings_of_result() | {"rows": data.digest}


def set_mode(module: Any, adapted: "PeftModel | None", *, recomputes: bool) -> None:
    """Set a `SummedLoss` to training mode, or only its adapters if that changes no result.

    The fast path needs a backbone in evaluation mode, which has no dropout and no recomputation of
    activations. So the backbone stays in evaluation mode only if the training uses neither.
    """
    module.eval()
    is_fast = module.backbone is not None and module.backbone.fast_layers() is not None
    if recomputes or not is_fast or _drops(module):
        module.train()
    elif adapted is not None:
        train_adapters(adapted)


def _drops(module: nn.Module) -> bool:
    """Return whether a module that has a fast path has dropout outside of its adapters."""
    return any(
        value > 0
        for name, part in module.named_modules()
        if "lora_dropout" not in name
        for key, value in vars(part).items()
        if isinstance(value, float) and ("drop" in key or isinstance(part, nn.Dropout))
    )


def make_optimizer(module: nn.Module, config: SupervisedConfig) -> Optimizer:
    """Return AdamW for the trained parameters; weight decay applies only to matrices."""
    assert isinstance(config.learning_rate, int | float)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if (p.ndim >= 2) == decays], "weight_decay": weight_decay}
        for decays, weight_decay in ((True, config.weight_decay), (False, 0.0))
    ]
    present = [group for group in groups if group["params"]]
    return torch.optim.AdamW(present, lr=config.learning_rate, fused=True)
