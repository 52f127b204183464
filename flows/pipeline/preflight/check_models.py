"""Refuse models that the run cannot use: damaged files, wrong roles, types that are not allowed."""

from collections.abc import Collection, Iterator

from transformers import PreTrainedTokenizerBase

from pipeline.inputs.run_data import RunData
from pipeline.judges.judge_names import read_judges
from pipeline.settings.settings import Settings
from pipeline.storage.workspace import original_names
from ppo_core.config.reward_names import read_rewards
from ppo_core.errors import ModelError
from ppo_core.models.files.finite_weights import require_finite_weights
from ppo_core.models.files.model_folder import check_model_folder
from ppo_core.models.files.model_types import EXACT, SCORING_ENCODERS, UNTRAINABLE
from ppo_core.models.loading import (
    check_policy_config,
    check_reward_config,
    check_vocabulary,
    load_config,
    load_tokenizer,
)


def check_models(data: RunData) -> None:
    """Raise if a model cannot be used as the policy or as the reward model.

    The policy must be decoder-only. The reward model must give one score, and have an
    end-of-sequence token if its settings need one.

    Raises:
        ModelError: see above; or see `check_model_types` and `check_model_files`.
    """
    settings = data.settings
    check_model_types(settings)
    for path in filter(None, (settings.policy, settings.reward_model)):
        check_model_files(path)
    check_policy_config(settings.policy)
    path = settings.reward_model or settings.policy
    tokenizer = data.reward_tokenizer
    if settings.reward_model:
        check_reward_config(path)
        require_template(data, tokenizer, path)
    if settings.reward_model_training.end_of_text and tokenizer.eos_token_id is None:
        raise ModelError(
            f"The tokenizer of the reward model, '{path}', has no end-of-sequence token, which "
            "each text must end with. Set end_of_text = false in [reward_model_training]."
        )


def check_model_files(path: str) -> None:
    """Raise if the files of a model are missing, damaged or contradict each other.

    Raises:
        ModelError: a file is missing or unreadable, a weight is not finite, or the tokenizer has
            tokens that the model lacks.
    """
    check_model_folder(path)
    require_finite_weights(path)
    check_vocabulary(load_config(path), load_tokenizer(path), path)


def require_template(data: RunData, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise if the policy reads prompts as a chat and a reward model has no chat template.

    Raises:
        ModelError: see above.
    """
    if data.is_chat and tokenizer.chat_template is None:
        raise ModelError(
            f"The policy reads a chat, but the tokenizer of the reward model '{path}' has no chat "
            "template. Set its chat_template, or set prompt_format to text."
        )


def check_model_types(settings: Settings) -> None:
    """Raise if a model that the settings name has a type that is not in `model_types`.

    If this setting is empty, the types that this project has checked are allowed. Only the
    configurations of the models are read.

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
