"""Check the rewards of PPO, and try each function on two rows before anything is trained."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.inputs.labeled_pairs import LabeledPair, example_pair
from pipeline.inputs.run_data import RunData
from pipeline.inputs.run_rewards import RunRewards
from pipeline.judges.judge_names import JudgePart, has_access_to_rewards
from pipeline.judges.llm_reward.job import LanguageModels, job_of_run
from pipeline.judges.transformers_model import check_chat_model
from pipeline.preflight.check_models import check_model_files
from pipeline.preflight.judge_trial import watched_trial, why_too_large
from pipeline.storage.workspace import original_names
from ppo_core.config.reward_names import NamedReward
from ppo_core.data.encode_prompts import prompt_text
from ppo_core.errors import JudgeError
from ppo_core.io.progress_bar import BAR_DELAY, progress
from ppo_core.models.loading import check_reward_config
from ppo_core.ppo.rewards import FunctionReward
from ppo_core.training.load_rewards import named_in_errors


def try_rewards(data: RunData) -> None:
    """Check each reward that the settings name; print its scores of two responses.

    Functions and language models score a held-out chosen response and an empty response, because
    the policy may give empty responses. A function scores both as if they answered the first
    training prompts, because the rows of these prompts have the columns that the function takes. If
    a function hangs, the watch ends the step. A language model is skipped if it does not fit this
    machine, or if only another step has the key of its server. A reward model is only checked.

    Raises:
        ConfigError: a function does not exist, takes wrong arguments, or takes a column that no
            prompt has.
        DataError: a column cannot be written as JSON.
        JudgeError: a language model gives no score, or its server does not answer.
        ModelError: a function fails, or returns no numbers; or a model cannot score.
    """
    rewards = RunRewards(data)
    if not rewards.named:
        return
    # Not inside `named_in_errors`: an error of `prompts` already names the function.
    rows = rewards.prompts() if rewards.functions else []
    pair = example_pair(data.test_pairs())
    number, delay = len(rewards.named), BAR_DELAY
    with watched_trial(data.settings), progress(number, "trying", "reward", delay=delay) as bar:
        for one in rewards.named:
            with named_in_errors(one):
                if one.kind == "python":
                    _try_function(one, rewards, rows, pair.chosen)
                elif one.is_language_model:
                    _try_language_model(one, rewards, pair)
                elif not one.is_own:
                    check_model_files(one.source)
                    check_reward_config(one.source)
            bar.update()


def _try_function(
    one: NamedReward, rewards: RunRewards, prompts: Sequence[Mapping[str, Any]], chosen: str
) -> None:
    tokenizer = rewards.data.policy_tokenizer
    function = FunctionReward(one.name, rewards.functions[one.name].function, tokenizer)
    # If there is only one row, it is used twice.
    rows = [prompts[0], prompts[min(1, len(prompts) - 1)]]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    given = function.score_texts([row["prompt"] for row in rows], [chosen, ""], columns)
    first, second = given.tolist()
    words = f"{first:z.4g} for an answer to another prompt, {second:z.4g} for an empty one"
    _print_scores(one, words)


def _try_language_model(one: NamedReward, rewards: RunRewards, pair: LabeledPair) -> None:
    data = rewards.data
    if one.kind == "transformers":
        check_chat_model(one.source)
    models = LanguageModels(job_of_run(rewards))
    reason = why_too_large(JudgePart(one.spec, one.kind, one.source), data.settings)
    if one.kind == "openai" and not has_access_to_rewards():
        reason = "only the training step has its key"
    if reason:
        _print_scores(one, f"not asked yet, because {reason}")
        return
    prompt = prompt_text(data.policy_tokenizer, pair.prompt)
    first, second = models.reward(one).scores([prompt, prompt], [pair.chosen, ""])
    if first.value is None:
        raise JudgeError(
            "it gave no score to a chosen answer, so PPO would have no reward. "
            f"{first.reason.rstrip('.')}. In the rubric, ask for one number, or name a model that "
            "can follow the rubric."
        )
    empty = "no score" if second.value is None else f"{second.value:g}"
    _print_scores(one, f"{first.value:g} for a chosen answer, {empty} for an empty one")


def _print_scores(one: NamedReward, words: str) -> None:
    print(f"rewards={original_names(one.spec)}: {words}", flush=True)
