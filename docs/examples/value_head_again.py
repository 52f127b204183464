"""Use a model that the classic loop saved: with its value head and, for a service, without it.

python docs/examples/value_head_again.py FOLDER "A prompt"
"""

import sys

import torch
from transformers import pipeline

from ppo_core import load_tokenizer
from ppo_core.classic import AutoModelForCausalLMWithValueHead

folder, prompt = sys.argv[1:]
tokenizer = load_tokenizer(folder)

# The folder also contains the value head, which returns the value of each token.
model = AutoModelForCausalLMWithValueHead.from_pretrained(folder).eval()
inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
with torch.no_grad():
    _, _, values = model(**inputs)
tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
for token, value in zip(tokens, values[0].tolist(), strict=True):
    print(f"{token}: {value:.3f}")

# For a service, the model without its value head is a plain transformers model.
generate = pipeline("text-generation", model.pretrained_model, tokenizer=tokenizer)
print(generate(prompt, max_new_tokens=24, do_sample=False)[0]["generated_text"])
