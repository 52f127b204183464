"""What a run leaves behind: the policy and its card."""

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ppo_core.config.ppo_config import PPOConfig
from ppo_core.distributed.engine import Engine
from ppo_core.distributed.saving import gather_weights, save_plain
from ppo_core.models.adapter_weights import save_adapter
from ppo_core.models.quantization import is_quantized
from ppo_core.ppo.ema import WeightAverage
from ppo_core.ppo.model_bundle import ModelBundle
from ppo_core.ppo.update import TrainState
from ppo_core.reporting.callbacks import Reporter
from ppo_core.training.model_card import push_folder, write_model_card

if TYPE_CHECKING:
    pass

ADAPTER = "adapter"
"""Folder of the adapter beside the merged policy."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PolicyExporter:
    """Writes the policy of a run; all processes call, the main one writes."""

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    parts: ModelBundle
    engine: Engine
    train_state: TrainState
    reporter: Reporter
    average: WeightAverage | None

    @property
    def trained_model(self) -> nn.Module:
        """The policy as transformers or peft knows it."""
        return self.parts.adapted or self.parts.policy.model

    def save_policy(self, folder: Path) -> None:
        """Policy and tokenizer, with the running mean of the weights if there is one."""
        averaged = self.average.swapped_in() if self.average else nullcontext()
        with averaged:
            self._write_policy(folder)

    def _write_policy(self, folder: Path) -> None:
        adapted, model = self.parts.adapted, self.parts.policy.model
        weights = gather_weights(self.engine, model, adapted)
        if not self.engine.is_main:
            return
        if adapted is not None:
            save_adapter(adapted, folder / ADAPTER, weights=weights)
        if adapted is not None and is_quantized(adapted):
            # Merging would round the adapter to the few bits of the base.
            logger.warning("The base is quantized: '%s' holds the adapter alone.", folder / ADAPTER)
        else:
            save_plain(model, adapted, folder, weights)
        self.tokenizer.save_pretrained(folder)

    def write_card(self, *, model_name: str | None = None, **details: Any) -> None:
        """README.md with the settings and the last metrics."""
        history = self.reporter.state.log_history
        if self.engine.is_main:
            write_model_card(
                Path(self.config.output_dir),
                config=self.config,
                base_model=getattr(self.parts.policy.model.config, "_name_or_path", ""),
                metrics=history[-1] if history else {},
                model_name=model_name,
                **details,
            )

    def push(self, commit_message: str, **details: Any) -> str | None:
        """Upload `output_dir` without its checkpoints, from the main process."""
        self.write_card(**details)
        if not self.engine.is_main:
            return None
        folder = Path(self.config.output_dir)
        return push_folder(
            folder,
            repo_id=self.config.hub_model_id or folder.resolve().name,
            token=self.config.hub_token,
            private=self.config.hub_private_repo,
            commit_message=commit_message,
        )
