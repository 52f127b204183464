"""The rewards that PPO sums: their entries in the settings, their columns and their digests."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.inputs.model_digests import digest_of_model
from pipeline.inputs.run_data import RunData
from pipeline.storage.workspace import original_names
from ppo_core.config.reward_names import NamedReward, read_rewards
from ppo_core.data.raw_columns import rows_with_columns
from ppo_core.data.reward_columns import AskedColumns, asked_columns, columns_of
from ppo_core.data.sources.source import open_source
from ppo_core.errors import ConfigError, DataError
from ppo_core.io.folder_cache import digest_of, digest_of_code
from ppo_core.io.text_files import read_text_file
from ppo_core.io.user_code import LoadedFunction
from ppo_core.training.load_rewards import load_functions

ASKED_BY = ("sampling", "max_reply_tokens", "attempts")
"""Settings of [judging] on which the replies of a language model depend."""

READ_BY = (
    "pipeline.judges.judge_prompt",
    "pipeline.judges.verdict",
    "pipeline.judges.llm_reward.score_question",
)
"""Modules that write the questions to a language model, and read its replies."""


@dataclass(frozen=True)
class RunRewards:
    """The setting `rewards` of a run; if it is empty, the reward model is the only reward."""

    data: RunData

    @cached_property
    def named(self) -> list[NamedReward]:
        """The entries of the setting."""
        return read_rewards(self.data.settings.rewards)

    @cached_property
    def functions(self) -> dict[str, LoadedFunction]:
        """The functions by name of the reward."""
        return load_functions([one for one in self.named if one.kind == "python"])

    @property
    def language_models(self) -> list[NamedReward]:
        """The language models that score responses by the rubric."""
        return [one for one in self.named if one.is_language_model]

    @cached_property
    def rubric(self) -> str:
        """The rubric of the language models.

        Raises:
            ConfigError: the file cannot be read, or is empty.
        """
        path = self.data.settings.rewards_rubric
        text = read_text_file(Path(path), ConfigError).strip()
        if not text:
            raise ConfigError(
                f"rewards_rubric={original_names(path)!r} is empty, so a language model would not "
                "know what to score. Write the rubric into the file."
            )
        return text

    @property
    def asked(self) -> list[AskedColumns]:
        """The columns that each function takes from the rows of the prompts."""
        asked = (asked_columns(name, one.function) for name, one in self.functions.items())
        return [one for one in asked if not one.is_empty]

    def digests(self) -> dict[str, str]:
        """Return name -> digest of each reward except the run's own reward model."""
        return {one.name: self._digest_of(one) for one in self.named if not one.is_own}

    def decides_the_result(self) -> dict[str, Any]:
        """Return what `rewards` adds to the inputs of the policy; {} if `rewards` is empty."""
        if not self.named:
            return {}
        digests = self.digests()
        return {
            "rewards": [[one.name, digests.get(one.name, one.kind)] for one in self.named],
            **({"columns": digest_of(self.prompts())} if self.asked else {}),
        }

    def prompts(self) -> list[dict[str, Any]]:
        """Return the training prompts, each with the columns that functions take from its row.

        Raises:
            ConfigError: no prompt has a column that a function requires.
            DataError: a column cannot be written as JSON.
        """
        settings, rows = self.data.settings, self.data.training_prompts()
        if not self.asked:
            return [{"prompt": prompt} for prompt in rows.column("prompt")]
        source = open_source(settings.prompts, allow_urls=settings.allow_data_urls)
        columns = columns_of(rows_with_columns(rows, source), self.asked)
        _require_json(columns, rows.source)
        return [
            {**{name: values[row] for name, values in columns.items()}, "prompt": prompt}
            for row, prompt in enumerate(rows.column("prompt"))
        ]

    def own_path(self, reward_model: str) -> str | None:
        """Return the path of the run's own reward model; None if `rewards` leaves it out."""
        is_used = not self.named or any(one.is_own for one in self.named)
        return reward_model if is_used else None

    def _digest_of(self, one: NamedReward) -> str:
        if one.kind == "python":
            return f"{one.source.rpartition(':')[2]}@{self.functions[one.name].version}"
        if one.is_language_model:
            return self._digest_of_scores(one)
        return digest_of_model(one.source)

    def _digest_of_scores(self, one: NamedReward) -> str:
        """Return a digest of everything on which a language model's scores depend.

        The digest excludes the address of a server, so the address may change during a training.
        """
        settings = self.data.settings
        is_here = one.kind == "transformers"
        return digest_of(
            [
                one.kind,
                digest_of_model(one.source) if is_here else one.source,
                settings.precision if is_here else "",
                self.rubric,
                *(getattr(settings.judging, name) for name in ASKED_BY),
                digest_of_code(*READ_BY),
            ]
        )


def _require_json(columns: Mapping[str, list[Any]], source: str) -> None:
    for name, values in columns.items():
        for wrong in _not_json(values):
            raise DataError(
                f"{source}: the column {name!r}, which a reward function takes, has the value "
                f"{wrong!r:.80}. PPO gets the columns as JSON, which cannot represent this value. "
                "Convert the column, or remove it from the function's parameters."
            )


def _not_json(values: list[Any]) -> Iterator[Any]:
    for value in values:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            yield value
