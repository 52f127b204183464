"""Train a policy whose mood follows a control token before the prompt, with the classic loop.

The reward is a classifier's logit of POSITIVE for [positive], the logit of NEGATIVE for [negative],
and minus the distance between both logits for [neutral]. Each line of PROMPTS has a `query`:

    python docs/examples/steered_sentiment.py --model_name lvwerra/gpt2-imdb \
        --reward_model lvwerra/distilbert-imdb --query_dataset PROMPTS.jsonl
"""

import random

from datasets import load_dataset
from transformers import HfArgumentParser, pipeline

from ppo_core import load_tokenizer
from ppo_core.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed

MOODS = {
    "[negative]": lambda positive, negative: negative,
    "[neutral]": lambda positive, negative: -abs(positive - negative),
    "[positive]": lambda positive, negative: positive,
}

(config,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses()
set_seed(config.seed)  # also for the initialization of the value head
tokenizer = load_tokenizer(config.model_name)
logits_of_all = {"top_k": None, "function_to_apply": "none", "trust_remote_code": False}
classify = pipeline("text-classification", config.reward_model, **logits_of_all)
rows = load_dataset("json", data_files=config.query_dataset, split="train")
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
trainer = PPOTrainer(config, model, None, tokenizer, rows)
chance = random.Random(config.seed)


def rewards_of(moods, texts):
    """Return the reward of each text under its mood."""
    logits = [{one["label"]: one["score"] for one in found} for found in classify(texts)]
    return [
        MOODS[mood](found["POSITIVE"], found["NEGATIVE"])
        for mood, found in zip(moods, logits, strict=True)
    ]


for batch in trainer.dataloader:
    moods = [chance.choice(list(MOODS)) for _ in batch["query"]]
    texts = [f"{mood} {query}" for mood, query in zip(moods, batch["query"], strict=True)]
    queries = [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts]
    responses = trainer.generate(queries, return_prompt=False, max_new_tokens=24)
    answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
    # Without the mood: otherwise the classifier would reward the word in the control token.
    whole = [" ".join(pair) for pair in zip(batch["query"], answers, strict=True)]
    rewards = rewards_of(moods, whole)
    stats = trainer.step(queries, responses, rewards)
    for mood in MOODS:
        own = [reward for reward, its in zip(rewards, moods, strict=True) if its == mood]
        print(f"{mood} {sum(own) / max(len(own), 1):.3f}", end="  ")
    print(f"KL {stats['objective/kl']:.2f}", flush=True)

trainer.save_pretrained(config.output_dir)
