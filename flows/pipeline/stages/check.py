"""`run --check`: check the inputs as the first step does, and estimate the memory, time and price.

The self-check compares our forward pass of the given models with the models' own forward pass.
"""

from collections.abc import Iterator

from pipeline.cost.run_size import (
    describe_memory,
    describe_run,
    describe_sizes,
    describe_time,
    measure_run,
)
from pipeline.inputs.run_data import RunData
from pipeline.promotion.fetch_champion import find_champion
from pipeline.promotion.find_start import find_start
from pipeline.settings.settings import Settings
from pipeline.stages.start import prepare_inputs
from ppo_core.config.placement import free_memory, placement_for_reading
from ppo_core.data.encode_prompts import encode_prompt
from ppo_core.models.loading import count_parameters, load_policy, load_reward_model
from ppo_core.models.policy import LanguageModel
from ppo_core.training.self_check import check_loaded

__all__ = ["check_run", "describe_sizes"]

CHECKED_PROMPTS = 64
"""Number of prompts whose tokens the self-check uses."""

BESIDE_WEIGHTS = 0.25
"""Memory that the self-check needs in addition to the weights, as a fraction of their size."""


def check_run(given: Settings) -> Iterator[str]:
    """Run the checks of the first step, and yield each text of the result as soon as it is known.

    The texts are, in order:

    1. with `start_from`, the models from which the reward model and the critic would start
    2. the sizes of the run
    3. the memory of the run
    4. the result of the self-check, which loads the given models
    5. the time and the price; the estimate may time a computation on this machine

    Nothing is trained or registered, and no run is created. The champion and the files of a
    built-in task stay in the cache, where a run reuses them.

    Raises:
        ConfigError: a setting is invalid.
        DataError: a data set cannot be used.
        ModelError: a model cannot be used, or MLflow does not answer.
    """
    settings = prepare_inputs(given)
    champion = find_champion(settings)
    if text := find_start(settings, None if champion is None else champion.version).text:
        yield text
    size = measure_run(settings, has_champion=champion is not None)
    yield describe_run(size)
    yield describe_memory(size, settings)
    yield self_check(settings)
    if time_and_price := describe_time(size, settings):
        yield time_and_price


def self_check(settings: Settings) -> str:
    """Compare our forward pass of the given models with the models' own; return a text."""
    placement = placement_for_reading(settings.precision)
    needed = placement.dtype.itemsize * count_parameters(settings.policy)
    reads_scores = placement_for_reading()
    if settings.reward_model:
        scorer = count_parameters(settings.reward_model, scores=True)
        needed += reads_scores.dtype.itemsize * scorer
    needed = round(needed * (1 + BESIDE_WEIGHTS))
    free = free_memory(placement.device)
    if needed > free:
        return (
            f"self-check: left out, because the models need {needed / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB are free; PPO runs the self-check before its first rollout"
        )
    data = RunData(settings)
    table = data.training_prompts().table
    prompts = table.select(range(min(CHECKED_PROMPTS, len(table))))["prompt"]
    reward_model = None
    if settings.reward_model:
        reward_model = load_reward_model(
            settings.reward_model,
            end_of_text=settings.reward_model_training.end_of_text,
            prompt_format=data.reward_format,
            placement=reads_scores,
        )
    found = check_loaded(
        LanguageModel(load_policy(settings.policy, placement=placement)),
        reward_model,
        [encode_prompt(data.policy_tokenizer, prompt) for prompt in prompts],
        samples_here=not settings.ppo.use_vllm,
    )
    numbers = ", ".join(
        f"{name} {value if isinstance(value, str) else f'{value:.1e}'}"
        for name, value in found.as_record().items()
    )
    return f"self-check, differences from the models' own forward: {numbers}"
