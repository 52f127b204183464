"""Four families learn: their mean reward doubles, on the CPU, within seconds."""

import pytest
import torch

from ppo_core.classic import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
)
from ppo_core.classic import PPOConfig as ClassicConfig
from ppo_core.classic import PPOTrainer as ClassicTrainer
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.trl.ppo_trainer import PPOTrainer
from tests.helpers.models.families import make_model
from tests.helpers.models.tiny import make_policy, make_prompts, make_tokenizer
from tests.helpers.slow_cases import slow

SEED = 1
LENGTH = 8
LIKED = 18
"""The reward is the share of tokens below this id, about three tenths of all."""

PROMPTS = make_prompts([2 + i % 3 for i in range(64)])


def share_of_liked(tokens: list[int]) -> float:
    return sum(token < LIKED for token in tokens) / max(1, len(tokens))


def reward(prompts: list[str], responses: list[str]) -> list[float]:
    """The same of texts of `make_tokenizer`, whose words are w0 w1 ... for tokens 3, 4, ..."""
    words = [response.replace("<unk>", "w0").split() for response in responses]
    return [share_of_liked([int(word[1:]) + 3 for word in row]) for row in words]


def learn_by_the_classic_loop(model, seed: int) -> list[float]:
    config = ClassicConfig(
        batch_size=64, mini_batch_size=64, learning_rate=3e-3, init_kl_coef=0.02, seed=seed
    )
    trainer = ClassicTrainer(config, model, None, make_tokenizer())
    queries = [torch.tensor(prompt) for prompt in PROMPTS]
    means = []
    for _ in range(15):
        responses = trainer.generate(
            queries, return_prompt=False, batch_size=64, max_new_tokens=LENGTH
        )
        own = [row[model.config.is_encoder_decoder :].tolist() for row in responses]
        scores = [torch.tensor(share_of_liked(row)) for row in own]
        means.append(trainer.step(queries, responses, scores)["ppo/mean_scores"])
    return means


def learn_by_the_trainer(model, seed: int, **details) -> list[float]:
    config = PPOConfig(
        total_episodes=20 * 64,
        batch_size=64,
        per_device_train_batch_size=64,
        response_length=LENGTH,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        temperature=1.0,
        kl_coef=0.02,
        seed=seed,
        num_sample_generations=0,
        save_strategy="no",
        disable_tqdm=True,
    )
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    texts = [tokenizer.decode(prompt) for prompt in PROMPTS]
    trainer = PPOTrainer(config, tokenizer, model, None, reward, texts, **details)
    return [metrics["objective/scores"] for metrics in trainer.train()]


def t5(seed: int) -> list[float]:
    model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(make_model("t5", seed=seed))
    return learn_by_the_classic_loop(model, seed)


def gpt2(seed: int) -> list[float]:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(make_policy("gpt2", seed=seed))
    return learn_by_the_classic_loop(model, seed)


def lora_qwen2(seed: int) -> list[float]:
    peft = pytest.importorskip("peft")
    # With the head: the random one's logits are so small that no state makes a token likely.
    adapted = ["q_proj", "v_proj", "o_proj", "down_proj", "lm_head"]
    lora = peft.LoraConfig(r=8, lora_alpha=32, target_modules=adapted)
    return learn_by_the_trainer(make_policy("qwen2", seed=seed), seed, peft_config=lora)


def gpt_neox(seed: int) -> list[float]:
    return learn_by_the_trainer(make_policy("gpt_neox", seed=seed), seed)


@pytest.mark.parametrize("learn", [lora_qwen2, *slow(t5, gpt2, gpt_neox)])
def test_the_reward_doubles(learn):
    means = learn(SEED)
    assert 0.1 < means[0] < 0.5
    assert means[-1] >= 2 * means[0]
