"""A story model learns to be cheerful: python docs/cheerful_stories.py MODEL PROMPTS.jsonl"""

import sys

from datasets import load_dataset
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer  # pip install vaderSentiment

from ppo_core import PPOConfig, PPOTrainer, load_policy, load_tokenizer

model, prompts = sys.argv[1:]
sentiment = SentimentIntensityAnalyzer()


def cheerfulness(prompts, responses):
    """From -1, gloomy, to 1, cheerful."""
    return [sentiment.polarity_scores(response)["compound"] for response in responses]


trainer = PPOTrainer(
    PPOConfig(total_episodes=2048, batch_size=64, response_length=32, learning_rate=1e-3),
    processing_class=load_tokenizer(model),
    model=load_policy(model),
    ref_model=None,
    reward_model=cheerfulness,
    train_dataset=load_dataset("json", data_files=prompts, split="train"),
)
history = trainer.train()
for update in history[:1] + history[-1:]:
    print(f"cheerfulness {update['objective/scores']:.2f}, KL {update['objective/kl']:.1f} nats")
trainer.save_model("cheerful-stories")
