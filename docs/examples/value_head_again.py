"""Load a model that the classic loop saved: for its values, and without them, to serve it.

python docs/examples/value_head_again.py FOLDER "A prompt"
"""

import sys

import torch
from transformers import pipeline

from ppo_core import load_tokenizer
from ppo_core.classic import AutoModelForCausalLMWithValueHead

folder, prompt = sys.argv[1:]
tokenizer = load_tokenizer(folder)

# The value head is in the folder, too: what the critic expects at each token.
model = AutoModelForCausalLMWithValueHead.from_pretrained(folder).eval()
with torch.no_grad():
    _, _, values = model(**tokenizer(prompt, return_tensors="pt", return_token_type_ids=False))
for token, value in zip(tokenizer.tokenize(prompt), values[0].tolist(), strict=True):
    print(f"{token}: {value:.3f}")

# For a service, the folder is a plain model of transformers.
generate = pipeline("text-generation", model.pretrained_model, tokenizer=tokenizer)
print(generate(prompt, max_new_tokens=24, do_sample=False)[0]["generated_text"])
