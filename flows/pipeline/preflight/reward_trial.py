"""Check the rewards of PPO, and try each function on two rows before anything is trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.inputs.data_sets import RunData
from pipeline.inputs.preference_pairs import label_pairs
from pipeline.inputs.run_rewards import RunRewards
from pipeline.preflight.judge_trial import watched_trial
from pipeline.storage.workspace import original_names
from ppo_core.config.reward_names import NamedReward
from ppo_core.io.progress_bar import SECONDS_BETWEEN_LINES, progress
from ppo_core.models.files.finite_weights import require_finite_weights
from ppo_core.models.files.model_folder import check_model_folder
from ppo_core.models.loading import (
    check_reward_config,
    check_vocabulary,
    load_config,
    load_tokenizer,
)
from ppo_core.ppo.reward_functions import FunctionReward
from ppo_core.training.rewards import named_in_errors


def try_rewards(data: RunData) -> None:
    """Check each reward that the settings name; print two rewards that each function returns.

    Each function scores two responses, of which the second is empty, because the policy may give
    empty responses. A function that hangs ends the step.

    Raises:
        ConfigError: a function does not exist, or it takes other arguments, or a column that no
            prompt has.
        DataError: a column cannot be written as JSON.
        ModelError: a function fails, or returns no numbers; or a model cannot score.
    """
    rewards = RunRewards(data)
    # An error of `prompts` names its function by itself; the function may be any in the list.
    rows = rewards.prompts() if rewards.functions else []
    number, delay = len(rewards.named), SECONDS_BETWEEN_LINES
    with watched_trial(data.settings), progress(number, "trying", "reward", delay=delay) as bar:
        for one in rewards.named:
            with named_in_errors(one):
                if one.kind == "python":
                    _try_function(one, rewards, rows)
                elif not one.is_own:
                    _check_model(one.source)
            bar.update()


def _try_function(
    one: NamedReward, rewards: RunRewards, prompts: Sequence[Mapping[str, Any]]
) -> None:
    tokenizer = rewards.data.policy_tokenizer
    function = FunctionReward(one.name, rewards.functions[one.name].function, tokenizer)
    # A single row is used twice.
    rows = [prompts[0], prompts[min(1, len(prompts) - 1)]]
    responses = [label_pairs(rewards.data.test_pairs())[0].chosen, ""]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    given = function.score_texts([row["prompt"] for row in rows], responses, columns)
    first, second = given.tolist()
    said = f"{first:z.4g} for a chosen answer, {second:z.4g} for an empty one"
    print(f"rewards={original_names(one.spec)}: {said}", flush=True)


def _check_model(path: str) -> None:
    check_model_folder(path)
    require_finite_weights(path)
    check_reward_config(path)
    check_vocabulary(load_config(path), load_tokenizer(path), path)
