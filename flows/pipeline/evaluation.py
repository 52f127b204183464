"""What a policy answers on held-out prompts."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.settings import Settings
from ppo_core.evaluation import Answers, answer_prompts
from ppo_core.loading import load_policy, load_tokenizer


def answer(
    policy: Path | str, reference: Path | str, prompts: Sequence[str], settings: Settings
) -> Answers:
    """One sampled answer of the policy in a folder to each prompt, compared with a reference."""
    return answer_prompts(
        load_policy(policy),
        load_tokenizer(policy),
        prompts,
        response_length=settings.ppo.response_length,
        temperature=settings.evaluation.temperature,
        seed=settings.seed,
        batch_size=settings.ppo.local_rollout_forward_batch_size,
        stop=settings.ppo.stop_token,
        stop_token_id=settings.ppo.stop_token_id,
        reference=load_policy(reference),
    )


def distinct_share(texts: Sequence[str]) -> float:
    """Share of the texts that are different: 1 if none repeats another."""
    return len(set(texts)) / len(texts)
