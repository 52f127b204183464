"""Forty mistakes that engineers make on their first day with the commands.

They were written down before any of them was run. `names` is what the message must name, the wrong
input, and `offers` the next move that it must offer: words that a person would accept.
"""

from dataclasses import dataclass

FLOW = "flows/rlhf.py run"

OWN = (
    "--policy policy --preferences pairs.jsonl --prompts train.jsonl --eval-prompts eval.jsonl "
    "--judge python:judge.py:judge"
)
"""Inputs of a run that are all right."""

PPO = "-m ppo_core --reward_model_path reward --output_dir out --total_episodes 16 --batch_size 8"
SFT = "-m ppo_core.supervised sft --output_dir out"
REWARD = "-m ppo_core.supervised reward --output_dir out"
RATE = "flows/win_rate.py --eval-prompts eval.jsonl"


@dataclass(frozen=True)
class Mistake:
    """A command line, and what must be said about it."""

    command: str
    """Words after `python`, in a folder with the inputs of `test_natural_mistakes.py`."""

    names: str
    """Regular expression: the wrong input."""

    offers: str
    """Regular expression: the next move."""

    is_cheap: bool = False
    """Whether the command line and the settings alone decide it: no data and no model is read."""

    is_accepted: bool = False
    """Whether the command goes on, with a warning."""


MISTAKES: dict[str, Mistake] = {
    # --- The command line and the settings of the flow
    "a flag of other trainers": Mistake(
        f"{FLOW} {OWN} --lr 3e-6", "--lr", r"--set ppo\.learning_rate=", is_cheap=True
    ),
    "the model by another name": Mistake(
        f"{FLOW} {OWN.replace('--policy', '--model')}", "--model", "--policy", is_cheap=True
    ),
    "run is forgotten": Mistake(
        f"flows/rlhf.py {OWN}", "--policy", r"flows/rlhf\.py run --policy", is_cheap=True
    ),
    "the settings file as a word": Mistake(
        f"{FLOW} my.toml", r"my\.toml", r"--config settings (FILE|my\.toml) run", is_cheap=True
    ),
    "the word settings is forgotten": Mistake(
        "flows/rlhf.py --config my.toml run",
        r"my\.toml",
        r"--config settings (FILE|my\.toml) run",
        is_cheap=True,
    ),
    "the settings file after run": Mistake(
        f"{FLOW} --config settings my.toml",
        "--config",
        r"before `?run.*--config settings (FILE|my\.toml) run",
        is_cheap=True,
    ),
    "a settings file that is not there": Mistake(
        "flows/rlhf.py --config settings mine.toml run",
        r"mine\.toml.*No such file",
        "(?i)name a|check the path",
        is_cheap=True,
    ),
    "--set without =": Mistake(
        f"{FLOW} {OWN} --set ppo.learning_rate 3e-6",
        r"ppo\.learning_rate|3e-6",
        r"--set ppo\.learning_rate=3e-6",
        is_cheap=True,
    ),
    "a word for a number": Mistake(
        f"{FLOW} {OWN} --set ppo.learning_rate=small",
        r"ppo\.learning_rate.*'small'",
        "(?i)number|float",
        is_cheap=True,
    ),
    "a setting without its section": Mistake(
        "flows/rlhf.py --config settings flat.toml run",
        "learning_rate",
        r"ppo\.learning_rate",
        is_cheap=True,
    ),
    "minibatches that do not divide the batch": Mistake(
        f"{FLOW} {OWN} --set ppo.batch_size=500 --set ppo.num_mini_batches=3",
        "500.*3|3.*500",
        "(?i)multiple of|divis|that divides|set (ppo.)?(batch_size|num_mini_batches)",
        is_cheap=True,
    ),
    "a warm-up in steps": Mistake(
        f"{FLOW} {OWN} --set sft.warmup_ratio=100",
        "warmup_ratio=100",
        "(?i)fraction|between 0 and|at most 1|below 1",
        is_cheap=True,
    ),
    "a model's name as the judge": Mistake(
        f"{FLOW} {OWN.replace('python:judge.py:judge', 'gpt-4o')}",
        "gpt-4o",
        "openai:(gpt-4o|MODEL)",
        is_cheap=True,
    ),
    "a judge without a key": Mistake(
        f"{FLOW} {OWN.replace('python:judge.py:judge', 'openai:gpt-4o')}",
        "OPENAI_API_KEY",
        r"(?i)set\b.*OPENAI_API_KEY|OPENAI_API_KEY.*\bset\b",
        is_cheap=True,
    ),
    "a million as 1e6": Mistake(
        f"{FLOW} {OWN} --total-episodes 1e6",
        "--total-episodes.*1e6",
        "(?i)whole number|integer",
        is_cheap=True,
    ),
    "resume before there was a run": Mistake(
        "flows/rlhf.py resume", "(?i)no (earlier |previous )?run|run id", r"\brun\b", is_cheap=True
    ),
    # --- The models of the flow
    "a model's path with a typo": Mistake(
        f"{FLOW} {OWN.replace('--policy policy', '--policy ./polcy')}",
        "polcy",
        "(?i)check the (path|name)|name a folder|is not a folder|hub id",
    ),
    "an adapter as the policy": Mistake(
        f"{FLOW} {OWN.replace('--policy policy', '--policy adapter')}",
        "'adapter'.*adapter_config|adapter.*(LoRA|PEFT|adapter)",
        "(?i)merge",
    ),
    "an encoder as the policy": Mistake(
        f"{FLOW} {OWN.replace('--policy policy', '--policy bert')}",
        "(?i)'bert'",
        "(?i)decoder-only|causal language model",
    ),
    "a GGUF file as the policy": Mistake(
        f"{FLOW} {OWN.replace('--policy policy', '--policy model.gguf')}",
        r"model\.gguf",
        "(?i)safetensors|transformers|folder",
    ),
    "a reward model with two labels": Mistake(
        f"{FLOW} {OWN} --reward-model two-labels --set preferences_test=pairs.jsonl",
        "two-labels.*2 labels",
        "(?i)one (label|score)|num_labels",
    ),
    "a generative reward model": Mistake(
        f"{FLOW} {OWN} --reward-model generative --set preferences_test=pairs.jsonl",
        "generative",
        "(?i)ForSequenceClassification|--preferences",
    ),
    # --- The data of the flow
    "prompts as preferences": Mistake(
        f"{FLOW} {OWN.replace('pairs.jsonl', 'train.jsonl')}",
        r"train\.jsonl.*chosen, rejected.*columns are.*prompt",
        "(?i)rename|columns",
    ),
    "a response longer than the context": Mistake(
        f"{FLOW} {OWN} --set ppo.response_length=100",
        "response_length.*100|100.*response",
        "(?i)lower (ppo.)?response_length",
    ),
    "evaluation on the training prompts": Mistake(
        f"{FLOW} --check {OWN.replace('train.jsonl', 'eval.jsonl')}",
        r"eval_prompts|eval\.jsonl",
        "(?i)warn.*(also|same|train).*(hold out|other prompts|unseen|remove)",
        is_accepted=True,
    ),
    "pairs of equal answers": Mistake(
        f"{FLOW} {OWN.replace('pairs.jsonl', 'equal.jsonl')}",
        r"equal\.jsonl",
        "(?i)(equal|ties|identical).*(add|correct|check)",
    ),
    "identical prompts": Mistake(
        f"{FLOW} --check {OWN.replace('train.jsonl', 'same.jsonl')}",
        r"same\.jsonl|prompts",
        "(?i)warn.*(identical|same|distinct|duplicate|repeat).*(check|add|remove)",
        is_accepted=True,
    ),
    # --- The world around the flow
    "a folder for results that cannot be written": Mistake(
        f"{FLOW} {OWN} --output-dir eval.jsonl/out", r"eval\.jsonl/out", "(?i)choose a writable"
    ),
    "an MLflow server that does not run": Mistake(
        f"MLFLOW_TRACKING_URI=http://127.0.0.1:9 {FLOW} {OWN}",
        r"127\.0\.0\.1:9",
        "(?i)start (it|the server)|check (that|the)|MLFLOW_TRACKING_URI",
    ),
    # --- `python -m ppo_core`
    "a name of transformers": Mistake(
        f"{PPO} --model_name_or_path policy --dataset_name train.jsonl --max_new_tokens 64",
        "max_new_tokens",
        "response_length",
        is_cheap=True,
    ),
    "messages that end in an answer as prompts": Mistake(
        f"{PPO} --model_name_or_path chat --dataset_name answered.jsonl",
        r"answered\.jsonl.*ends? in an answer",
        "(?i)remove the|column (to )?messages|rename",
    ),
    "embeddings as prompts": Mistake(
        f"{PPO} --model_name_or_path policy --dataset_name embeddings.parquet",
        r"embeddings\.parquet.*columns are embedding, id",
        "(?i)rename|columns",
    ),
    # --- `python -m ppo_core.supervised`
    "the training is forgotten": Mistake(
        "-m ppo_core.supervised --model_name_or_path policy --dataset_name pairs.jsonl "
        "--output_dir out",
        "--model_name_or_path|training",
        "sft or reward",
        is_cheap=True,
    ),
    "accepted in the place of chosen": Mistake(
        f"{REWARD} --model_name_or_path policy --dataset_name accepted.jsonl",
        "column chosen.*columns are accepted",
        "(?i)rename|columns",
    ),
    "semicolons in a csv file": Mistake(
        f"{REWARD} --model_name_or_path policy --dataset_name semicolons.csv",
        r"semicolons\.csv",
        "(?i)comma|semicolon|separat|delimit",
    ),
    "a spreadsheet": Mistake(
        f"{SFT} --model_name_or_path policy --dataset_name demos.xlsx",
        r"demos\.xlsx",
        r"(?i)(convert|save|export).*csv|csv.*(convert|save|export)",
    ),
    "a dialogue of HH without its last answer": Mistake(
        f"{REWARD} --model_name_or_path chat --dataset_name hh.jsonl",
        r"hh\.jsonl.*does not end in an answer",
        "(?i)remove|add the|end (each|both|every)",
    ),
    "a misspelt form of prompts": Mistake(
        f"{SFT} --model_name_or_path policy --dataset_name demos.jsonl --prompt_format plain",
        "prompt_format.*plain",
        "auto.*chat.*text",
        is_cheap=True,
    ),
    # --- The other commands
    "a misspelt alias": Mistake(
        f"{RATE} --model models:/summarizer@champoin --judge python:judge.py:judge",
        "summarizer.*champoin|champoin.*summarizer",
        r"(?i)aliases? .*champion|champion'?\?|check the|show summarizer",
    ),
    "a misspelt name of a model": Mistake(
        "flows/registry.py rollback sumarizer",
        "sumarizer",
        r"(?i)did you mean|check the name|registered models|\bsummarizer",
    ),
}
