"""Continue film reviews in a positive mood, with the classic loop and a causal model or T5.

The reward is a classifier's logit of POSITIVE. Each line of PROMPTS has a `query`:

    python docs/examples/sentiment.py --model_name lvwerra/gpt2-imdb \
        --reward_model lvwerra/distilbert-imdb --query_dataset PROMPTS.jsonl
"""

from datasets import load_dataset
from transformers import AutoConfig, HfArgumentParser, pipeline

from ppo_core import load_tokenizer
from ppo_core.classic import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    set_seed,
)

(config,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses()
set_seed(config.seed)  # also for the initialization of the value head
tokenizer = load_tokenizer(config.model_name)
logits_of_all = {"top_k": None, "function_to_apply": "none", "trust_remote_code": False}
classify = pipeline("text-classification", config.reward_model, **logits_of_all)
has_encoder = AutoConfig.from_pretrained(
    config.model_name, trust_remote_code=False
).is_encoder_decoder
kind = AutoModelForSeq2SeqLMWithValueHead if has_encoder else AutoModelForCausalLMWithValueHead

rows = load_dataset("json", data_files=config.query_dataset, split="train")
rows = rows.map(lambda row: {"input_ids": tokenizer.encode(row["query"])}).with_format("torch")
trainer = PPOTrainer(config, kind.from_pretrained(config.model_name), None, tokenizer, rows)


def rewards_of(texts):
    """Return the logit of POSITIVE for each text."""
    logits = [{one["label"]: one["score"] for one in found} for found in classify(texts)]
    return [found["POSITIVE"] for found in logits]


for batch in trainer.dataloader:
    responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=24)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    whole = [" ".join(pair) for pair in zip(batch["query"], texts, strict=True)]
    rewards = rewards_of(whole)
    stats = trainer.step(batch["input_ids"], responses, rewards)
    trainer.log_stats(stats, {**batch, "response": texts}, rewards)
    mean = sum(rewards) / len(rewards)
    print(f"reward {mean:.3f}, KL {stats['objective/kl']:.2f}", flush=True)

trainer.save_pretrained(config.output_dir)
