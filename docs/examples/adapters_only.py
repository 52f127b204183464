"""Train a LoRA adapter with a reward adapter on the same base: one copy of the base in memory.

The reward adapter was trained on a `...ForSequenceClassification` with one label. Each line of
PROMPTS has a `query`:

    python docs/examples/adapters_only.py --model_name BASE --reward_model REWARD_ADAPTER \
        --query_dataset PROMPTS.jsonl
"""

import torch
from datasets import load_dataset
from peft import LoraConfig
from torch.nn.utils.rnn import pad_sequence
from transformers import HfArgumentParser

from ppo_core import load_tokenizer
from ppo_core.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed

(config,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses()
set_seed(config.seed)  # also for the initialization of the value head
tokenizer = load_tokenizer(config.model_name)
rows = load_dataset("json", data_files=config.query_dataset, split="train")
rows = rows.map(lambda row: {"input_ids": tokenizer.encode(row["query"])}).with_format("torch")
model = AutoModelForCausalLMWithValueHead.from_pretrained(
    config.model_name,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    reward_adapter=config.reward_model,
)
# No reference is passed: the policy with its adapter switched off is the reference.
trainer = PPOTrainer(config, model, None, tokenizer, rows)


def rewards_of(queries, responses):
    """Return the score of the last token of each text."""
    texts = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
    ids = pad_sequence(texts, batch_first=True, padding_value=tokenizer.pad_token_id)
    lengths = torch.tensor([len(text) for text in texts])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    scores = model.compute_reward_score(ids.to(model.device), mask.to(model.device))
    return list(scores[torch.arange(len(texts)), lengths - 1, 0].cpu())


for batch in trainer.dataloader:
    responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=24)
    rewards = rewards_of(batch["input_ids"], responses)
    stats = trainer.step(batch["input_ids"], responses, rewards)
    mean = torch.stack(rewards).mean().item()
    print(f"reward {mean:.3f}, KL {stats['objective/kl']:.2f}", flush=True)

trainer.save_pretrained(config.output_dir)
