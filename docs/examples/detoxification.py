"""Make a model answer toxic prompts politely: half precision, and layers shared with the reference.

The reward is a classifier's logit of `nothate` for the answer alone. Each line of PROMPTS has a
`query`:

    python docs/examples/detoxification.py --model_name EleutherAI/gpt-neo-125M \
        --reward_model facebook/roberta-hate-speech-dynabench-r4-target \
        --query_dataset PROMPTS.jsonl --learning_rate 1e-5
"""

import torch
from datasets import load_dataset
from transformers import HfArgumentParser, pipeline

from ppo_core import load_tokenizer
from ppo_core.classic import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    set_seed,
)

(config,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses()
set_seed(config.seed)  # also for the initialization of the value head
tokenizer = load_tokenizer(config.model_name)
logits_of_all = {"top_k": None, "function_to_apply": "none", "trust_remote_code": False}
classify = pipeline("text-classification", config.reward_model, **logits_of_all)
rows = load_dataset("json", data_files=config.query_dataset, split="train")
rows = rows.map(lambda row: {"input_ids": tokenizer.encode(row["query"])}).with_format("torch")

model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name, dtype=torch.bfloat16)
# The lower half of the layers is frozen, and policy and reference share it.
layers = model.config.num_hidden_layers
reference = create_reference_model(model, num_shared_layers=layers // 2)
trainer = PPOTrainer(config, model, reference, tokenizer, rows)
length = LengthSampler(8, 25)

for batch in trainer.dataloader:
    responses = trainer.generate(batch["input_ids"], length, return_prompt=False)
    answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
    logits = [{one["label"]: one["score"] for one in found} for found in classify(answers)]
    rewards = [found["nothate"] for found in logits]
    stats = trainer.step(batch["input_ids"], responses, rewards)
    trainer.log_stats(stats, {**batch, "response": answers}, rewards)
    mean = sum(rewards) / len(rewards)
    print(f"reward {mean:.3f}, KL {stats['objective/kl']:.2f}", flush=True)

trainer.save_pretrained(config.output_dir)
