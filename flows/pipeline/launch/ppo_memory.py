"""Sizes of models and batches of a run's PPO, whose memory `ppo_core.training.memory` computes."""

from math import ceil

from pipeline.inputs import data_sets
from pipeline.settings.settings import Settings
from ppo_core.models.loading import empty_model
from ppo_core.models.reward_model import RewardModel
from ppo_core.ppo.schedule import Schedule
from ppo_core.training.memory import BF16, FP32, ModelSize, PPOSize
from ppo_core.training.model_size import count_adapter_parameters, model_size


def ppo_size(
    settings: Settings, schedule: Schedule, *, longest_prompt: int, processes: int, on_gpus: bool
) -> PPOSize | None:
    """Return the sizes of PPO; None if states are offloaded or DeepSpeed has its own settings.

    Args:
        settings: settings of the run, whose inputs were checked.
        schedule: sizes of the batches.
        longest_prompt: tokens of the longest prompt.
        processes: number of PPO processes on all machines.
        on_gpus: whether each process has a GPU.

    Raises:
        ModelError: a model cannot be read.
    """
    ppo, lora = settings.ppo, settings.lora
    if ppo.offload or ppo.deepspeed:
        return None
    policy = empty_model(settings.policy)
    tokens = longest_prompt + ppo.response_length
    minibatch = ceil(schedule.batch_size / ppo.num_mini_batches / processes)
    rows = min(ppo.per_device_train_batch_size, minibatch)
    reward, critic = _scorers(settings)
    half = lora.dtype == "bfloat16"
    return PPOSize(
        policy=model_size(policy),
        critic=None if ppo.shared_critic else critic or model_size(policy),
        reward=reward,
        adapter=count_adapter_parameters(policy, lora.r, lora.target_modules) if lora.r else 0,
        base_bytes=BF16 if half else FP32,
        sharding=ppo.sharding or ("ddp" if processes > 1 else "none"),
        processes=processes,
        gathers=ppo.ds3_gather_for_generation,
        autocast=on_gpus and not half if ppo.bf16 is None else ppo.bf16,
        recomputes=ppo.gradient_checkpointing,
        prompt_tokens=longest_prompt,
        response_tokens=ppo.response_length,
        sampled_rows=min(
            ppo.local_rollout_forward_batch_size, ceil(schedule.batch_size / processes)
        ),
        trained_tokens=max(tokens, ppo.max_tokens_per_microbatch or rows * tokens),
    )


def _scorers(settings: Settings) -> tuple[ModelSize, ModelSize | None]:
    """Return the size of the reward model, and of the critic if it is a copy of that model."""
    model = empty_model(settings.reward_model or settings.policy, scores=True)
    scorer = RewardModel(model, data_sets.reward_tokenizer(settings), end_of_text=False)
    reads_along = scorer.reads_tokens_of(data_sets.policy_tokenizer(settings))
    size = model_size(model)
    return size, size if scorer.lm_head is not None and reads_along else None
