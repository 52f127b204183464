"""Refuse models of a type that is not in the setting `model_types`.

Without this setting, the types that this project has checked are allowed.
"""

from collections.abc import Collection, Iterator

from pipeline.judges.judge_names import read_judges
from pipeline.settings.settings import Settings
from pipeline.storage.workspace import original_names
from ppo_core.config.reward_names import read_rewards
from ppo_core.errors import ModelError
from ppo_core.models.files.model_types import EXACT, SCORING_ENCODERS, UNTRAINABLE
from ppo_core.models.loading import load_config


def check_model_types(settings: Settings) -> None:
    """Raise if a model that the settings name has a type that is not allowed.

    Only the configurations of the models are read.

    Raises:
        ModelError: a type is not allowed, or a configuration cannot be read.
    """
    for name, path, known in _named_models(settings):
        allowed = frozenset(settings.model_types) or known
        found = load_config(path).model_type
        cannot_train = name == "policy" and found in UNTRAINABLE
        if found not in allowed or cannot_train:
            reason = _reason(found, settings.model_types)
            next_move = (
                "If you trust the model, name the types of all models of the run in the setting, "
                f'as in model_types = ["llama", "{found}"].'
            )
            if cannot_train:
                reason = f"cannot be trained: {UNTRAINABLE[found]}"
                next_move = "Use another model."
            raise ModelError(
                f"{name}='{original_names(path)}' has the model type {found!r}, which {reason}. "
                f"The model was not loaded. {next_move}"
            )


def _named_models(settings: Settings) -> Iterator[tuple[str, str, Collection[str]]]:
    """Yield the setting, the path and the known types of each model that the settings name."""
    known = {"reward-model": EXACT | SCORING_ENCODERS, "transformers": EXACT}
    yield "policy", settings.policy, EXACT
    if settings.reward_model:
        yield "reward_model", settings.reward_model, known["reward-model"]
    for one in read_rewards(settings.rewards):
        if one.kind in known and not one.is_own:
            yield "rewards", one.source, known[one.kind]
    judges = {"judge": settings.judge, "fresh_pairs.labeller": settings.fresh_pairs.judge}
    for name, spec in judges.items():
        for part in read_judges(spec) if spec else ():
            if part.kind in known:
                yield f"{name}={part.kind}", part.source, known[part.kind]


def _reason(found: str, given: Collection[str]) -> str:
    """Return why a type is refused, as the end of a sentence."""
    if given:
        return f"is not in model_types={list(given)}"
    return (
        "is not among the types for which this project has checked log-probabilities and scores: "
        "the code of transformers for it is rarely used, so the run could train on wrong values"
    )
