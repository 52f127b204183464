"""Train a story model to be cheerful; the reward is a plain function of the texts."""

# pip install vaderSentiment; python docs/cheerful_stories.py MODEL PROMPTS.jsonl
import sys

from datasets import load_dataset
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from ppo_core import PPOConfig, PPOTrainer, load_policy, load_tokenizer

path, prompts = sys.argv[1:]
sentiment = SentimentIntensityAnalyzer()


def cheerfulness(prompts, responses):
    """Return scores from -1 (gloomy) to 1 (cheerful)."""
    return [sentiment.polarity_scores(response)["compound"] for response in responses]


trainer = PPOTrainer(
    PPOConfig(total_episodes=1536, batch_size=64, response_length=32, learning_rate=1e-3),
    processing_class=load_tokenizer(path),
    model=load_policy(path),
    ref_model=None,
    reward_model=cheerfulness,
    train_dataset=load_dataset("json", data_files=prompts, split="train"),
)
scores = [update["objective/scores"] for update in trainer.train()]
print(f"Cheerfulness {scores[0]:.2f} -> {scores[-1]:.2f}")
trainer.save_model("cheerful-stories")
