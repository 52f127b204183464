"""Score answers from 0 to 1 by the guards of the settings."""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from pipeline.evaluation.guards.functions import load_guards, score_by_function
from pipeline.evaluation.guards.languages import may_share_language
from pipeline.evaluation.guards.refusals import is_refusal
from pipeline.evaluation.pair_accuracy import Array
from pipeline.judges.verdict import JudgedPrompt, without_thoughts
from pipeline.settings.gate_configs import GuardsConfig
from pipeline.storage.workspace import original_names
from ppo_core.data.chat_template import is_messages
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.training.answer_prompts import Answers

Guard = Callable[[Sequence[JudgedPrompt], Answers], Array | None]
"""Function that returns the scores (N,) of answers to prompts. It returns None if it cannot score
the answers because they were decoded without a stop token."""

BUILT_IN_SOURCE = "built-in"
"""Source of the guards that are not functions of a user."""


def guards_of(config: GuardsConfig) -> dict[str, tuple[str, Guard]]:
    """Return the source and the scoring function of each guard of the settings, by name.

    Raises:
        ConfigError: a function does not exist, cannot be imported, or does not take two lists.
    """
    built_in: dict[str, Guard] = {
        "stops": _stops,
        "has_text": _of_answer(lambda prompt, text: has_text(text)),
        "answers": _of_answer(lambda prompt, text: not is_refusal(text)),
        "refuses": _of_answer(lambda prompt, text: is_refusal(text)),
        "language": _of_answer(lambda prompt, text: may_share_language(_asked_in(prompt), text)),
        "format": _each(lambda prompt, text: bool(re.fullmatch(config.format, text.strip()))),
    }
    guards = {name: (BUILT_IN_SOURCE, built_in[name]) for name in config.applied}
    for name, loaded in load_guards(config).items():
        source = f"{original_names(config.functions[name])}, version {loaded.version}"
        guards[name] = (source, partial(_by_function, name, loaded.function))
    return guards


def has_text(answer: str) -> bool:
    """Return whether an answer has a character that a reader sees."""
    # Categories: C are control and invisible characters, Z are spaces.
    return any(unicodedata.category(character)[0] not in "CZ" for character in answer)


def _stops(prompts: Sequence[JudgedPrompt], answers: Answers) -> Array | None:
    return None if answers.stopped is None else np.array(answers.stopped, dtype=float)


def _each(holds: Callable[[JudgedPrompt, str], bool]) -> Guard:
    def scores(prompts: Sequence[JudgedPrompt], answers: Answers) -> Array:
        pairs = zip(prompts, answers.texts, strict=True)
        return np.array([holds(prompt, text) for prompt, text in pairs], dtype=float)

    return scores


def _of_answer(holds: Callable[[JudgedPrompt, str], bool]) -> Guard:
    """Return a guard that does not read reasoning in <think> tags, as Qwen3 writes it."""
    return _each(lambda prompt, text: holds(prompt, without_thoughts(text)))


def _by_function(
    name: str,
    function: Callable[..., object],
    prompts: Sequence[JudgedPrompt],
    answers: Answers,
) -> Array:
    return score_by_function(name, function, list(map(shown_prompt, prompts)), answers.texts)


def _asked_in(prompt: JudgedPrompt) -> str:
    """Return the text whose language an answer should have: the prompt or a chat's last message."""
    return prompt[-1]["content"] if is_messages(prompt) else str(prompt)
