"""Train with several rewards at once: a reward model, a plain function, and their weights.

python docs/examples/several_rewards.py SFT_MODEL REWARD_MODEL PROMPTS.jsonl OUTPUT [EPISODES]
"""

import sys

from datasets import load_dataset

from ppo_core import PPOConfig, PPOTrainer, load_policy, load_reward_model, load_tokenizer

policy, reward_model, prompts, output, episodes = (*sys.argv[1:], "10000")[:5]


def brevity(prompts, responses):
    """Return 0 for up to 12 words, and -0.1 for each further word."""
    return [-0.1 * max(0, len(response.split()) - 12) for response in responses]


trainer = PPOTrainer(
    PPOConfig(
        output_dir=output,
        total_episodes=int(episodes),
        batch_size=64,
        response_length=24,
        reward_weights=[1.0, 0.5],
    ),
    processing_class=load_tokenizer(policy),
    model=load_policy(policy),
    ref_model=None,
    reward_model=[load_reward_model(reward_model), brevity],
    train_dataset=load_dataset("json", data_files=prompts, split="train"),
)
for update in trainer.train():
    print({name: round(update[name], 3) for name in update if name.startswith("rewards/")})
trainer.save_model(output)
