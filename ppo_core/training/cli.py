"""The command `python -m ppo_core`: load data and models by name, and train."""

import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_core.checkpointing.fingerprint import Layout
from ppo_core.config.hub_ids import with_revision
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.reward_names import OWN, NamedReward, read_rewards, same_place
from ppo_core.config.row_settings import PromptFormat, ReadOptions, parse_columns
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.data.encode_prompts import encode_prompt
from ppo_core.data.prompt_set import make_run_prompts
from ppo_core.data.prompts import context_length
from ppo_core.data.raw_columns import rows_with_columns
from ppo_core.data.rows.describe import describe_first, describe_reading, require_columns_read
from ppo_core.data.rows.overlong import fit_prompts
from ppo_core.data.rows.read_rows import read_rows
from ppo_core.data.sources.source import named_data, open_source
from ppo_core.data.text_config import text_config
from ppo_core.distributed.process import is_main_process
from ppo_core.errors import ConfigError
from ppo_core.io.atomic_files import require_writable, write_atomically
from ppo_core.io.progress_bar import ProgressFile, listening
from ppo_core.io.random_state import seed_global_generators
from ppo_core.models.adapters import get_peft_config
from ppo_core.models.files.critic_files import load_critic, require_whole_critic
from ppo_core.models.files.rollout_files import KeptRollout, read_rollouts
from ppo_core.models.loading import (
    check_vocabulary,
    is_classifier,
    load_config,
    load_policy,
    load_reward_model,
    load_tokenizer,
    member_folders,
)
from ppo_core.models.quantization import get_kbit_device_map, get_quantization_config
from ppo_core.models.reward_model import RewardModel
from ppo_core.reporting.metrics_file import SELF_CHECK_FILE
from ppo_core.supervised.pair_ranker import PairRanker, make_classifier
from ppo_core.training.load_rewards import (
    LoadLanguageModel,
    load_functions,
    named_in_errors,
    reward_prints,
)
from ppo_core.training.model_setup import join_processes, set_up_models
from ppo_core.training.trainer import Trainer

MANY_PROMPTS, HELD_OUT = 1000, 100
"""If there are more than MANY_PROMPTS prompts, `load_prompts` may hold out the last HELD_OUT."""


def train_ppo(
    config: PPOConfig,
    script: ScriptArguments,
    model: ModelArguments,
    load_language_model: LoadLanguageModel | None = None,
) -> None:
    """Train the policy, and save it with its tokenizer in `policy_dir` or `output_dir`.

    `load_language_model` loads rewards that are language models, see `load_functions`.

    Raises:
        ConfigError: two settings contradict each other, or a required setting is missing.
        DataError: the prompts cannot be used.
        ModelError: a model or tokenizer cannot be loaded or used.
        TrainingError: training cannot continue.
    """
    if config.push_to_hub and script.policy_dir is not None:
        raise ConfigError(
            "push_to_hub=True uploads only a policy in output_dir, and "
            f"policy_dir={script.policy_dir!r} saves the policy elsewhere. Remove policy_dir or "
            "push_to_hub."
        )
    # Seed the global generators, because a reward function may use them.
    seed_global_generators(config.seed)
    _check_folders(config.output_dir, script.policy_dir, script.critic_dir)
    # The launcher ends a training that shows no progress, and an update may take an hour.
    with listening(ProgressFile(Path(config.output_dir))):
        _train(config, script, model, load_language_model)


def _train(
    config: PPOConfig,
    script: ScriptArguments,
    model: ModelArguments,
    load_language_model: LoadLanguageModel | None,
) -> None:
    policy = config.sft_model_path or model.model_name_or_path
    if policy is None:
        raise ConfigError("There is no policy. Set --model_name_or_path to a folder or hub id.")
    start = with_revision(policy, model.model_revision)
    source = model.model_name_or_path or policy
    tokenizer = load_tokenizer(start if source == policy else source, script.prompt_format)
    context = context_length(load_config(start))
    rows = load_prompts(config, script, tokenizer, context)
    with named_data(script.dataset_name):
        trainer = _make_trainer(config, script, model, start, tokenizer, rows, load_language_model)
    resume = script.resume_from_checkpoint
    try:
        trainer.train(
            resume_from_checkpoint=True if resume == "latest" else resume,
            resume_anyway=script.resume_anyway,
            stop_after_updates=script.stop_after_updates,
        )
    finally:
        # Save even if an integration or the upload to the hub fails, because a server is down.
        if trainer.is_done:
            # The callbacks are called in reverse order, each one even if something before it fails.
            with ExitStack() as saves:
                if script.critic_dir is not None:
                    saves.callback(trainer.save_critic, Path(script.critic_dir))
                saves.callback(trainer.save_model, script.policy_dir)
                if trainer.engine.is_main:
                    record = json.dumps(trainer.self_check.as_record())
                    write_atomically(Path(config.output_dir) / SELF_CHECK_FILE, record)


def _check_folders(output_dir: str, policy_dir: str | None, critic_dir: str | None) -> None:
    """Raise if a folder cannot be written, or if `critic_dir` is also the folder of the policy.

    Raises:
        ConfigError: a folder is not writable, or the policy would be saved in `critic_dir`.
    """
    policy = "output_dir" if policy_dir is None else "policy_dir"
    if critic_dir is not None and same_place(critic_dir, policy_dir or output_dir):
        raise ConfigError(
            f"critic_dir={critic_dir!r} is also the {policy}, so the files of the critic would "
            "overwrite the files of the policy. Set critic_dir to another folder."
        )
    require_writable(Path(output_dir), "output_dir")
    if policy_dir is not None:
        require_writable(Path(policy_dir), "policy_dir")
    if critic_dir is not None:
        require_writable(Path(critic_dir), "critic_dir")


def _make_trainer(
    config: PPOConfig,
    script: ScriptArguments,
    model: ModelArguments,
    start: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: tuple[Any, Any],
    load_language_model: LoadLanguageModel | None,
) -> Trainer:
    policy, (train_rows, eval_rows) = load_start(start, model), rows
    reward, prints = _load_rewards(config, script, start, tokenizer, load_language_model)
    adapter = get_peft_config(model)
    critic, rollouts = None, list[KeptRollout]()
    if script.critic_path is not None:
        of_critic = load_config(script.critic_path)
        check_vocabulary(of_critic, tokenizer, script.critic_path)
        critic = load_critic(script.critic_path)
        rollouts = read_rollouts(script.critic_path, text_config(of_critic).vocab_size)
    config, engine = join_processes(config, policy, adapter)
    models = set_up_models(
        config, tokenizer, engine, policy=policy, critic=critic, reward=reward, peft_config=adapter
    )
    if script.critic_dir is not None:
        require_whole_critic(models.critic, models.policy)
    models = replace(models, fingerprints={**models.fingerprints, **prints})
    asked = models.rewards.asked_columns()
    if asked:
        train_rows = _with_columns(train_rows, script.dataset_train_split, script)
        # Without a test split, `eval_rows` are rows of the training split.
        is_test = config.eval_strategy == "steps"
        split = script.dataset_test_split if is_test else script.dataset_train_split
        eval_rows = eval_rows and _with_columns(eval_rows, split, script)
    prompts = make_run_prompts(
        train_rows, eval_rows, tokenizer, models.policy.model, config, asked=asked
    )
    return Trainer(
        config,
        models,
        prompts,
        engine=engine,
        earlier_rollouts=rollouts,
        keeps_rollouts=script.critic_dir is not None,
    )


def _load_rewards(
    config: PPOConfig,
    script: ScriptArguments,
    start: str,
    tokenizer: PreTrainedTokenizerBase,
    load_language_model: LoadLanguageModel | None,
) -> tuple[Any, dict[str, Layout]]:
    """Return the rewards of the run; also their fingerprints if the setting `rewards` is given."""
    prompt_format: PromptFormat = "text" if tokenizer.chat_template is None else "auto"
    end_of_text, path = script.reward_end_of_text, config.reward_model_path
    rewards = read_rewards(script.rewards or [OWN])
    functions = load_functions(rewards, load_language_model)
    _refuse_what_no_reward_uses(path, script, rewards)
    loaded: dict[str, Any] = {}
    for one in rewards:
        if one.is_own:
            loaded[one.name] = load_reward(
                path,
                start,
                config.seed,
                bias=script.reward_bias,
                gain=script.reward_gain,
                end_of_text=end_of_text,
                prompt_format=prompt_format,
            )
        elif one.name in functions:
            loaded[one.name] = functions[one.name].function
        else:
            with named_in_errors(one):
                loaded[one.name] = load_reward_model(
                    one.source, end_of_text=end_of_text, prompt_format=prompt_format
                )
    # Without the setting `rewards`, the metric keeps the name of the reward model's class.
    given = loaded if script.rewards else loaded[OWN]
    return given, reward_prints(rewards, functions) if script.rewards else {}


def _refuse_what_no_reward_uses(
    path: str | None, script: ScriptArguments, rewards: Sequence[NamedReward]
) -> None:
    has_model = any(one.kind == "reward-model" for one in rewards)
    has_own = any(one.is_own for one in rewards)
    settings = (
        ("reward_model_path", path or None, None, has_own),
        ("reward_bias", script.reward_bias, ScriptArguments.reward_bias, has_own),
        ("reward_gain", script.reward_gain, ScriptArguments.reward_gain, has_own),
        (
            "reward_end_of_text",
            script.reward_end_of_text,
            ScriptArguments.reward_end_of_text,
            has_model,
        ),
    )
    for name, value, default, is_used in settings:
        if value != default and not is_used:
            raise ConfigError(
                f"{name}={value!r} would be ignored, because rewards={script.rewards} leaves out "
                f"{OWN}. Add {OWN} to rewards, or remove {name}."
            )


def _with_columns(rows: Dataset, split: str, script: ScriptArguments) -> list[dict[str, Any]]:
    source = open_source(
        str(script.dataset_name), split, script.dataset_config, allow_urls=script.allow_data_urls
    )
    return rows_with_columns(rows, source)


def load_prompts(
    config: PPOConfig,
    script: ScriptArguments,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
) -> tuple[Dataset, Dataset | None]:
    """Return the training prompts, and the prompts for evaluation or samples (None without any).

    If `eval_strategy` is not "steps", no test split is read. The second result is then the
    `watched_prompts`. Without `watched_prompts`, the second result is the last `HELD_OUT` prompts,
    which are held out, if there are more than `MANY_PROMPTS` prompts and the settings ask for
    samples. `context` is the policy's context length; None means no limit.

    Raises:
        ConfigError: no data set is named, or another setting would disable `watched_prompts`.
        DataError: a split cannot be read.
    """
    if script.dataset_name is None:
        raise ConfigError("There are no prompts. Set --dataset_name to a folder or hub id.")

    def read(split: str) -> Dataset:
        return _read_prompts(split, script, tokenizer, context, config.response_length)

    rows, watched = read(script.dataset_train_split), script.watched_prompts
    if watched:
        if config.eval_strategy == "steps" or config.num_sample_generations == 0:
            raise ConfigError(
                f"watched_prompts={watched} would be ignored: it needs eval_strategy='no' "
                f"(now {config.eval_strategy!r}) and num_sample_generations above 0 (now "
                f"{config.num_sample_generations}). Change these settings, or remove "
                "watched_prompts."
            )
        count = min(watched, len(rows))
        return rows, rows.select([number * len(rows) // count for number in range(count)])
    if config.eval_strategy == "steps":
        return rows, read(script.dataset_test_split)
    if len(rows) <= MANY_PROMPTS or config.num_sample_generations == 0:
        return rows, None
    last = len(rows) - HELD_OUT
    return rows.select(range(last)), rows.select(range(last, len(rows)))


def _read_prompts(
    split: str,
    script: ScriptArguments,
    tokenizer: PreTrainedTokenizerBase,
    context: int | None,
    response_length: int,
) -> Dataset:
    renamed = parse_columns(script.columns)
    rows = read_rows(
        str(script.dataset_name),
        "prompts",
        is_chat=tokenizer.chat_template is not None,
        split=split,
        config_name=script.dataset_config,
        takes_token_ids=True,
        options=ReadOptions(renamed, script.allow_data_urls, script.max_left_out),
    )
    require_columns_read(renamed, rows)
    fitting = fit_prompts(
        rows,
        tokenizer,
        context=context,
        response_length=response_length,
        overlong=script.overlong,
    )
    # All processes read the rows, but only one describes them.
    if is_main_process():
        print(describe_reading(fitting), file=sys.stderr)
        ids = encode_prompt(tokenizer, fitting.table[0]["prompt"])
        print(describe_first(tokenizer, ids), file=sys.stderr)
    return fitting.table


def load_start(path: str, model: ModelArguments) -> PreTrainedModel:
    """Load the policy to start from; a hub id may name a revision, as in `org/name@revision`.

    Raises:
        ConfigError: the quantization settings contradict each other.
        ModelError: the folder or hub id has no causal language model, or a package for
            quantization is missing.
    """
    return load_policy(path, **loading_options(model))


def loading_options(model: ModelArguments) -> dict[str, Any]:
    """Return the arguments of `load_policy` for the policy to start from.

    Raises:
        ConfigError, ModelError: see `load_start`.
    """
    named, quantization = model.dtype != "auto", get_quantization_config(model)
    options: dict[str, Any] = {
        "attn_implementation": model.attn_implementation,
        # With "auto", the trainer learns the precision of the files, in which it saves the policy.
        # The trainer itself casts the trained weights.
        "dtype": getattr(torch, model.dtype) if model.use_peft and named else "auto",
        "quantization_config": quantization,
    }
    if quantization is not None:
        # Without a map, transformers loads the base of every process onto the first GPU.
        options["device_map"] = get_kbit_device_map()
    return options


def load_reward(
    path: str | None,
    start: str,
    seed: int,
    *,
    prompt_format: PromptFormat = "auto",
    **reading: Any,
) -> RewardModel:
    """Load the reward model; if it is not a trained classifier, warn and add a random head.

    Args:
        path: folder or hub id of the reward model; if None, a head is added to the policy.
        start: folder or hub id of the policy.
        seed: seed of the random head.
        prompt_format: "text" if the policy reads prompts as text, not as a chat.
        reading: bias, gain and end_of_text of a `RewardModel`.

    Raises:
        ModelError: the folder or hub id has no model, or the model returns several scores.
    """
    base = path or start
    if member_folders(base) or is_classifier(base):
        return load_reward_model(base, prompt_format=prompt_format, **reading)
    given = f"reward_model_path={path!r} is not a reward model" if path else "No reward_model_path"
    warnings.warn(
        f"{given}: '{base}' gets a score head with RANDOM weights. The scores are meaningless, so "
        "this run can only test the setup. Train a reward model with: python -m "
        "ppo_core.supervised reward.",
        stacklevel=2,
    )
    tokenizer = load_tokenizer(base, prompt_format)
    seed_global_generators(seed)
    classifier = make_classifier(load_policy(base), tokenizer.pad_token_id)
    PairRanker(classifier)  # initializes the head's weights, so that scores are near 0
    return RewardModel(classifier.eval(), tokenizer, **reading)
