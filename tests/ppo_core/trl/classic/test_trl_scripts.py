"""Scripts that were written for TRL run after a change of their import lines."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from ppo_core import (
    SIMPLE_CHAT_TEMPLATE,
    ConfigError,
    ModelConfig,
    PPOConfig,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from ppo_core.classic import AutoModelForCausalLMWithValueHead
from ppo_core.config.argument_parser import parse_arguments
from ppo_core.config.ppo_config import PPOConfig as UpdateConfig
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.helpers.runs.forked_python import run_python

TRAINER_SCRIPT = """
import shutil

import torch
from accelerate import PartialState
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
)

from trl import ModelConfig, ScriptArguments
from trl import get_kbit_device_map, get_peft_config, get_quantization_config
from trl.experimental.ppo import PPOConfig, PPOTrainer
from trl.trainer.utils import SIMPLE_CHAT_TEMPLATE

if __name__ == "__main__":
    parser = HfArgumentParser((ScriptArguments, PPOConfig, ModelConfig))
    data_args, training_args, model_args = parser.parse_args_into_dataclasses()
    shutil.rmtree(training_args.output_dir, ignore_errors=True)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, padding_side="left")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    if tokenizer.chat_template is None:
        tokenizer.chat_template = SIMPLE_CHAT_TEMPLATE
    loading = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "trust_remote_code": model_args.trust_remote_code,
        "dtype": getattr(torch, model_args.dtype),
    }
    quantization_config = get_quantization_config(model_args)
    if quantization_config is not None:
        loading["device_map"] = get_kbit_device_map()
        loading["quantization_config"] = quantization_config
    peft_config = get_peft_config(model_args)
    value_model = AutoModelForSequenceClassification.from_pretrained(
        training_args.reward_model_path, num_labels=1
    )
    reward_model = AutoModelForSequenceClassification.from_pretrained(
        training_args.reward_model_path, num_labels=1
    )
    policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, **loading)
    ref_policy = None
    if peft_config is None:
        ref_policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, **loading)

    def prepare(split):
        rows = load_dataset(
            data_args.dataset_name, name=data_args.dataset_config, split=split
        )

        def encode(batch):
            return {"input_ids": tokenizer(batch["prompt"], padding=False)["input_ids"]}

        return rows.map(
            encode,
            batched=True,
            remove_columns=rows.column_names,
            num_proc=training_args.dataset_num_proc,
        )

    with PartialState().local_main_process_first():
        train_dataset = prepare(data_args.dataset_train_split)
        eval_dataset = prepare(data_args.dataset_test_split)

    trainer = PPOTrainer(
        args=training_args,
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=peft_config,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=data_args.dataset_name)
    trainer.generate_completions()
"""

CLASSIC_SCRIPT = """
import json
import sys

import torch
from datasets import load_dataset
from tqdm import tqdm
from transformers import AutoTokenizer

from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed
from trl import create_reference_model
from trl.core import LengthSampler
from trl.import_utils import is_npu_available, is_xpu_available

config = PPOConfig(
    model_name=sys.argv[1],
    query_dataset=sys.argv[2],
    learning_rate=1e-3,
    batch_size=8,
    mini_batch_size=4,
    ppo_epochs=2,
)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
tokenizer.pad_token = tokenizer.eos_token


def build_dataset():
    rows = load_dataset(config.query_dataset, split="train")
    rows = rows.rename_columns({"prompt": "review"})
    input_size = LengthSampler(2, 5)

    def tokenize(row):
        row["input_ids"] = tokenizer.encode(row["review"])[: input_size()]
        row["query"] = tokenizer.decode(row["input_ids"])
        return row

    rows = rows.map(tokenize, batched=False)
    rows.set_format(type="torch")
    return rows


def collator(data):
    return {key: [row[key] for row in data] for key in data[0]}


set_seed(config.seed)
model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ref_model = create_reference_model(model)
ppo_trainer = PPOTrainer(
    config, model, ref_model, tokenizer, dataset=build_dataset(), data_collator=collator
)
device = ppo_trainer.accelerator.device
assert not is_npu_available() and not is_xpu_available()

output_length_sampler = LengthSampler(4, 9)
generation_kwargs = {
    "min_length": -1,
    "top_k": 0.0,
    "top_p": 1.0,
    "do_sample": True,
    "pad_token_id": tokenizer.eos_token_id,
}

for epoch, batch in tqdm(enumerate(ppo_trainer.dataloader)):
    query_tensors = batch["input_ids"]
    response_tensors, ref_response_tensors = ppo_trainer.generate(
        query_tensors,
        return_prompt=False,
        generate_ref_response=True,
        length_sampler=output_length_sampler,
        **generation_kwargs,
    )
    batch["response"] = tokenizer.batch_decode(response_tensors)
    batch["ref_response"] = tokenizer.batch_decode(ref_response_tensors)
    rewards = [torch.tensor(float("w7" in text)).to(device) for text in batch["response"]]
    batch["ref_rewards"] = [torch.tensor(float("w7" in text)) for text in batch["ref_response"]]
    stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
    columns = ["query", "response", "ref_response", "ref_rewards"]
    ppo_trainer.log_stats(stats, batch, rewards, columns_to_log=columns)

print(json.dumps({"batches": epoch + 1, "kl": float(stats["objective/kl"])}))
ppo_trainer.save_pretrained(sys.argv[3])
"""

QUICKSTART = """
import json
import sys

import torch
from transformers import AutoTokenizer

from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
from trl.core import respond_to_batch

model = AutoModelForCausalLMWithValueHead.from_pretrained(sys.argv[1])
ref_model = create_reference_model(model)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.eos_token

config = PPOConfig(**{"batch_size": 1, "mini_batch_size": 1})
query_tensor = tokenizer.encode("w1 w2 w3", return_tensors="pt")
response_tensor = respond_to_batch(model, query_tensor)

ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer)
reward = [torch.tensor(1.0)]
train_stats = ppo_trainer.step([query_tensor[0]], [response_tensor[0]], reward)
print(json.dumps({"tokens": len(response_tensor[0]), "kl": float(train_stats["objective/kl"])}))
"""


def test_a_script_for_the_trainer_of_trl_1_12_runs_after_its_import_line_is_changed(tmp_path):
    sft = save_policy(tmp_path / "sft", "gpt_neox")
    make_classifier("gpt_neox").save_pretrained(tmp_path / "reward")
    output = tmp_path / "ppo"
    printed = run(
        re.sub(r"from trl\S* import", "from ppo_core import", TRAINER_SCRIPT),
        tmp_path,
        *("--dataset_name", save_prompts(tmp_path / "prompts")),
        *("--model_name_or_path", sft, "--sft_model_path", sft),
        *("--reward_model_path", tmp_path / "reward", "--output_dir", output),
        *"--num_ppo_epochs 1 --num_mini_batches 1 --learning_rate 1e-3 --total_episodes 16".split(),
        *"--per_device_train_batch_size 4 --gradient_accumulation_steps 2".split(),
        *"--local_rollout_forward_batch_size 1 --missing_eos_penalty 1.0".split(),
        *"--stop_token eos --response_length 8".split(),
    )
    assert "Samples after update 2" in printed
    assert moved(AutoModelForCausalLM.from_pretrained(output), sft)
    assert AutoTokenizer.from_pretrained(output).pad_token == "[PAD]"


def test_such_a_script_in_two_processes_may_have_a_language_model_as_reward(tmp_path):
    # Each process draws the scores of reward and value model, which the checkpoint lacks. The
    # processes of a launcher start with random seeds, and those of this test with equal ones.
    sft, output = save_policy(tmp_path / "sft", "gpt_neox"), tmp_path / "ppo"
    seeded = "import os, torch; torch.manual_seed(int(os.environ['RANK']))\n"
    script = re.sub(r"from trl\S* import", "from ppo_core import", TRAINER_SCRIPT)
    (tmp_path / "script.py").write_text(seeded + script)
    done = run_python(
        "script.py",
        *("--dataset_name", save_prompts(tmp_path / "prompts")),
        *("--model_name_or_path", sft, "--sft_model_path", sft),
        *("--reward_model_path", sft, "--output_dir", output),
        *"--num_ppo_epochs 1 --total_episodes 8 --per_device_train_batch_size 4".split(),
        *"--response_length 4 --num_sample_generations 0".split(),
        folder=tmp_path,
        processes=2,
    )
    assert done.codes == [0, 0], done.stderr[-3000:]
    assert done.stderr.count("The score head of a GPTNeoXForSequenceClassification differed") == 2
    assert moved(AutoModelForCausalLM.from_pretrained(output), sft)


def test_a_script_without_model_paths_loads_the_default_models_of_trl():
    parsed = HfArgumentParser(PPOConfig).parse_args_into_dataclasses(["--total_episodes", "8"])
    assert {parsed[0].sft_model_path, parsed[0].reward_model_path} == {"EleutherAI/pythia-160m"}
    command, *_ = parse_arguments([UpdateConfig], ["--total_episodes", "8"])
    assert {command.sft_model_path, command.reward_model_path} == {None}


def test_a_script_may_load_models_in_any_precision_and_makes_their_settings_by_trls_names():
    parse = HfArgumentParser(ModelConfig).parse_args_into_dataclasses
    (plain,) = parse(["--model_name_or_path", "gpt2", "--dtype", "bfloat16"])
    assert plain.torch_dtype == "bfloat16"
    assert get_peft_config(plain) is get_quantization_config(plain) is get_kbit_device_map() is None
    (adapted,) = parse(["--use_peft", "--lora_r", "4", "--load_in_4bit"])
    assert get_peft_config(adapted).r == 4
    assert get_quantization_config(adapted).bnb_4bit_quant_type == "nf4"
    with pytest.raises(ConfigError, match="lora_r takes effect only with --use_peft"):
        parse(["--lora_r", "4"])


def test_the_simple_chat_template_names_the_roles():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = SIMPLE_CHAT_TEMPLATE
    messages = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "User: hi\n\nAssistant: hi\n\nUser: hi\n\nAssistant:"


def test_a_script_with_the_classic_loop_runs_after_its_import_lines_are_changed(tmp_path):
    start, output = save_policy(tmp_path / "start", "gpt2"), tmp_path / "tuned"
    prompts = save_prompts(tmp_path / "prompts")
    printed = run(classic(CLASSIC_SCRIPT), tmp_path, start, prompts, output)
    last = numbers(printed)
    assert last["batches"] == 20 // 8
    assert abs(last["kl"]) < 5
    model = AutoModelForCausalLMWithValueHead.from_pretrained(output)
    assert moved(model.pretrained_model, start)
    assert model.v_head.summary.weight.any()


def test_the_classic_quickstart_runs_after_its_import_lines_are_changed(tmp_path):
    printed = run(classic(QUICKSTART), tmp_path, save_policy(tmp_path / "start", "gpt2"))
    last = numbers(printed)
    assert last["tokens"] == 20
    assert abs(last["kl"]) < 1e-3  # reference and policy begin as one


def classic(script: str) -> str:
    """The script with its import lines changed."""
    return re.sub(r"from trl\S* import", "from ppo_core.classic import", script)


def save_policy(folder: Path, family: str) -> Path:
    make_policy(family).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def save_prompts(folder: Path) -> Path:
    folder.mkdir()
    for split, count in (("train", 20), ("test", 6)):
        rows = [{"prompt": " ".join(f"w{(i + j) % 58}" for j in range(5))} for i in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)
    return folder


def run(script: str, folder: Path, *arguments: object) -> str:
    """Run the script without TRL and network; return its output."""
    assert "trl" not in script
    (folder / "script.py").write_text(script)
    done = run_python("script.py", *arguments, folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def numbers(printed: str) -> dict[str, float]:
    """The JSON line of the script, among the output of libraries."""
    return json.loads(next(line for line in printed.splitlines() if line.startswith("{")))


def moved(model: torch.nn.Module, start: Path) -> bool:
    """Whether every weight matrix has changed."""
    before = AutoModelForCausalLM.from_pretrained(start).state_dict()
    matrices = {name: weight for name, weight in model.state_dict().items() if weight.ndim == 2}
    return all(not torch.equal(weight, before[name]) for name, weight in matrices.items())
