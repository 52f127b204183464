"""Compute the sizes of models and batches of a run's trainings, for `pipeline.cost.memory`."""

from dataclasses import dataclass, replace
from math import ceil

from pipeline.cost.memory.model_size import count_adapter_parameters, model_size
from pipeline.cost.memory.ppo_memory import PPOSize
from pipeline.cost.memory.sizes import BF16, FP32, ModelSize
from pipeline.cost.memory.supervised_memory import SupervisedSize
from pipeline.inputs.run_data import RunData
from pipeline.launch.commands import gpus
from pipeline.settings.settings import Settings
from pipeline.settings.training_sections import SupervisedSection
from ppo_core.config.placement import is_fast_in_bf16
from ppo_core.config.reward_names import OWN, read_rewards
from ppo_core.config.run_config import Sharding
from ppo_core.config.script_arguments import ALL_LINEAR
from ppo_core.models.loading import empty_model, load_tokenizer
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.schedule import Schedule
from ppo_core.supervised.step_order import TOKENS_ON_CPU


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a training."""

    number: int
    """Number of processes on all machines."""

    machines: int = 1

    on_gpus: bool
    """Whether each process has a GPU."""

    @property
    def unsharded(self) -> Sharding:
        """The sharding if each process has the full model."""
        return "ddp" if self.number > 1 else "none"


def ppo_size(
    settings: Settings, schedule: Schedule, *, longest_prompt: int, processes: Processes
) -> PPOSize | None:
    """Return the sizes of PPO; None with `offload` or a file of DeepSpeed's settings.

    Args:
        settings: settings of the run, whose inputs were checked.
        schedule: sizes of the batches.
        longest_prompt: tokens of the longest prompt.
        processes: the processes of PPO.

    Raises:
        ModelError: a model cannot be read.
    """
    ppo, lora = settings.ppo, settings.lora
    if ppo.offload or ppo.deepspeed:
        return None
    policy = empty_model(settings.policy)
    tokens = longest_prompt + ppo.response_length
    minibatch = ceil(schedule.batch_size / ppo.num_mini_batches / processes.number)
    rows = min(ppo.per_device_train_batch_size, minibatch)
    rewards, critic = _scorers(settings)
    half = lora.dtype == "bfloat16"
    sampled = min(
        ppo.local_rollout_forward_batch_size, ceil(schedule.batch_size / processes.number)
    )
    return PPOSize(
        policy=model_size(policy),
        critic=None
        if ppo.shared_critic or not ppo.has_critic
        else critic or _without_head(model_size(policy)),
        rewards=tuple(rewards),
        adapter=count_adapter_parameters(policy, lora.r, lora.target_modules) if lora.r else 0,
        base_bytes=BF16 if half else FP32,
        sharding=_kind(ppo.sharding, processes),
        processes=processes.number,
        machines=processes.machines,
        gathers=ppo.ds3_gather_for_generation,
        averages=bool(ppo.ema_decay),
        autocast=_computes_in_bf16(
            False if half and ppo.bf16 is None else ppo.bf16,
            settings,
            model_size(policy).width,
            processes,
        ),
        recomputes=ppo.gradient_checkpointing,
        prompt_tokens=longest_prompt,
        response_tokens=ppo.response_length,
        sampled_rows=sampled,
        trained_rows=rows,
        trained_tokens=max(tokens, ppo.max_tokens_per_microbatch or rows * tokens),
        on_cpu=not processes.on_gpus,
    )


def sft_size(settings: Settings, *, longest: int, processes: Processes) -> SupervisedSize | None:
    """Return the sizes of fine-tuning the policy; None with `offload`.

    `longest` is the number of tokens of the longest row.

    Raises:
        ModelError: the policy cannot be read.
    """
    return _supervised_size(settings.sft, settings, longest, processes, writes=True)


def reward_size(settings: Settings, *, longest: int, processes: Processes) -> SupervisedSize | None:
    """Return the sizes of training the reward model from the policy; None with `offload`.

    `longest` is the number of tokens of the longest text of a pair.

    Raises:
        ModelError: the policy cannot be read.
    """
    section = settings.reward_model_training
    return _supervised_size(section, settings, longest, processes, writes=False)


def adapter_parameters(settings: Settings, rank: int) -> int:
    """Return the number of parameters of adapters of this rank on all linear layers of the policy.

    Raises:
        ModelError: the policy cannot be read.
    """
    return count_adapter_parameters(empty_model(settings.policy), rank, [ALL_LINEAR])


def _supervised_size(
    section: SupervisedSection,
    settings: Settings,
    longest: int,
    processes: Processes,
    *,
    writes: bool,
) -> SupervisedSize | None:
    if section.offload:
        return None
    model = empty_model(settings.policy, scores=not writes)
    rank, modules = section.lora.r, section.lora.target_modules
    rows = min(section.batch_size, ceil(section.rows_per_step / processes.number))
    texts = 1 if writes else 2
    tokens = rows * longest * texts
    if not processes.on_gpus:
        tokens = min(tokens, max(TOKENS_ON_CPU, longest * texts))
    return SupervisedSize(
        model=model_size(model),
        writes=writes,
        adapter=count_adapter_parameters(model, rank, modules) if rank else 0,
        sharding=_kind(section.sharding, processes),
        processes=processes.number,
        machines=processes.machines,
        autocast=_computes_in_bf16(section.bf16, settings, model_size(model).width, processes),
        recomputes=section.gradient_checkpointing,
        tokens=tokens,
        longest=longest,
        texts=texts,
        on_cpu=not processes.on_gpus,
    )


def _computes_in_bf16(
    asked: bool | None,
    settings: Settings,
    width: int,
    processes: Processes,
) -> bool:
    """Return whether the passes of a training compute in bfloat16 by autocast.

    If the settings do not set the precision, bfloat16 is assumed on a GPU that the settings name,
    and on a GPU of another machine.
    """
    if asked is not None:
        return asked
    if processes.on_gpus and (settings.hardware.gpu or not gpus()):
        return True
    return is_fast_in_bf16(width, use_cpu=not processes.on_gpus)


def _kind(sharding: Sharding | None, processes: Processes) -> Sharding:
    return sharding or processes.unsharded


def _scorers(settings: Settings) -> tuple[list[ModelSize], ModelSize | None]:
    """Return the sizes of all models that score, and the critic's size.

    The critic is a copy of the first reward model that has a weight other than 0 and reads the
    policy's tokens. The critic's size is None if no reward model meets both conditions.
    """
    data = RunData(settings)
    named = read_rewards(settings.rewards or [OWN])
    weights = settings.ppo.reward_weights or [1.0] * len(named)
    counted = {one.source for one, weight in zip(named, weights, strict=True) if weight}
    # The own model comes first. Its source is empty, and PPO loads it only if `rewards` has it.
    sources = sorted((one.source for one in named if one.kind == "reward-model"), key=bool)
    sizes, critics = [], []
    for source in sources:
        path = source or settings.reward_model or settings.policy
        tokenizer = load_tokenizer(path, data.reward_format) if source else data.reward_tokenizer
        model = empty_model(path, scores=True)
        scorer = RewardModel(model, tokenizer, end_of_text=False)
        sizes.append(model_size(model))
        if not source:
            sizes += [sizes[0]] * (_members(settings) - 1)
        reads_along = scorer.lm_head is not None and scorer.reads_tokens_of(data.policy_tokenizer)
        if source in counted and reads_along:
            critics.append(sizes[-1])
    here = (one.source for one in named if one.kind == "transformers")
    sizes += [model_size(empty_model(source)) for source in here]
    return sizes, next(iter(critics), None)


def _members(settings: Settings) -> int:
    """Return the number of models whose mean is the reward of the run's own reward model."""
    is_given = settings.reward_model and not settings.fresh_pairs.wanted
    return 1 if is_given else settings.reward_model_training.members


def _without_head(policy: ModelSize) -> ModelSize:
    """Return the size of a critic that is a copy of the policy's backbone with a value head.

    An LM head that is tied to the embeddings has no parameters of its own to subtract.
    """
    head = policy.width * policy.vocabulary
    is_tied = policy.outside_layers < 2 * head
    fewer = 0 if is_tied else head
    return replace(
        policy,
        parameters=policy.parameters - fewer + policy.width,
        outside_layers=policy.outside_layers - fewer + policy.width,
    )
