"""`python -m ppo_core.supervised`: runs from a shell, and refused flags."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ppo_core.config.trl_names import SUPERVISED_ALIASES, SUPERVISED_INSTEAD
from ppo_core.errors import ConfigError
from ppo_core.supervised.supervised_cli import (
    SupervisedArguments,
    SupervisedLoraArguments,
    main,
    parse_supervised,
)
from ppo_core.supervised.supervised_config import SupervisedConfig
from tests.helpers.models.chat import make_chat_tokenizer, say
from tests.helpers.models.tiny import make_policy
from tests.helpers.runs.forked_python import Ended, run_python

REQUIRED = "--model_name_or_path m --dataset_name d --output_dir o".split()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_policy().save_pretrained(folder)
    make_chat_tokenizer().save_pretrained(folder)
    return folder


def write_rows(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(*words: object) -> Ended:
    return run_python("-m", "ppo_core.supervised", *words)


def test_sft_on_chat_messages_writes_a_model_that_learnt(base, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": say("w0", "w1 w2")}])
    folder = tmp_path / "sft"
    flags = ["--model_name_or_path", base, "--dataset_name", rows, "--output_dir", folder]
    ran = start("sft", *flags, "--num_epochs", 20, "--learning_rate", 1e-2, "--bf16")
    assert ran.returncode == 0, ran.stderr
    metrics = json.loads(ran.stdout.splitlines()[-1])
    assert metrics["steps"] == 20
    assert metrics["loss"] < 0.5
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        say("w0"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=3, do_sample=False)[0]
    assert tokenizer.decode(answer).endswith("w1 w2 <eos>")


def test_reward_with_adapters_and_margins_writes_a_classifier(base, tmp_path):
    pair = {"prompt": "w0", "chosen": "w1", "rejected": "w2", "margin": 0.5}
    rows = write_rows(tmp_path / "rows.jsonl", [pair])
    folder = tmp_path / "rm"
    flags = ["--model_name_or_path", base, "--dataset_name", rows, "--output_dir", folder]
    options = ["--num_epochs", 20, "--learning_rate", 1e-2, "--center_rewards_coefficient", 0.01]
    ran = start("reward", *flags, *options, "--use_peft", "--lora_target_modules", "q_proj")
    assert ran.returncode == 0, ran.stderr
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    chosen, rejected = model(torch.tensor([[3, 4, 1], [3, 5, 1]])).logits[:, 0].tolist()
    assert chosen > rejected + 0.5


def test_bad_input_is_one_line_on_standard_error_and_exit_code_1(base, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "w0", "reply": "w1"}])
    folder = tmp_path / "sft"
    ran = start(
        *("sft", "--model_name_or_path", base, "--dataset_name", rows, "--output_dir", folder)
    )
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "There is no column completion" in ran.stderr
    assert "the columns are prompt, reply" in ran.stderr
    assert not folder.exists()


def test_a_column_that_no_row_has_is_refused(base, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [{"post": "w0", "completion": "w1"}])
    flags = f"--model_name_or_path {base} --dataset_name {rows} --output_dir {tmp_path}/out"
    assert main(f"sft {flags} --columns prompt=post completion=reply".split()) == 1
    assert "completion=reply was not used: no data set has the column" in capsys.readouterr().err


def test_ties_alone_are_nothing_to_train_on(base, tmp_path, capsys):
    row = {"prompt": "w0", "chosen": "w1", "rejected": "w2", "tie": True}
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    flags = f"--model_name_or_path {base} --dataset_name {rows} --output_dir {tmp_path}/out"
    assert main(f"reward {flags}".split()) == 1
    assert "has no row to train on: all of its rows are ties" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "'' is not a training. Begin with sft or reward"),
        ("dpo", "'dpo' is not a training"),
        ("sft", "flags are required: --model_name_or_path, --dataset_name, --output_dir"),
        ("sft MODEL --batch_size 0", "batch_size=0 must be a whole number, at least 1"),
        ("sft MODEL --batch_size many", "invalid int value: 'many'"),
        ("sft MODEL --max_steps 5", "--max_steps=5 is not supported: set num_epochs."),
        ("sft MODEL --packing", "--packing=True is not supported: each row is a sequence"),
        ("sft MODEL --lora_task_type SEQ_CLS", "the adapters of this training are always CAUSAL_"),
        ("reward MODEL --disable_dropout", "--disable_dropout=True is not supported: the dropout"),
        ("reward MODEL --eval_strategy steps", "--eval_strategy='steps' is not supported: nothing"),
        (
            "sft MODEL --lr 1e-4",
            "There is no setting --lr, so 0.0001 would change nothing.",
        ),
        ("sft MODEL -lr 1e-4", "Did you mean --learning_rate?"),
        (
            "sft --model base",
            "There is no setting --model, so 'base' would change nothing.",
        ),
        ("sft MODEL --num_train_epochs 0.5", "--num_train_epochs: invalid int value: '0.5'"),
        ("sft MODEL --columns prompt=a prompt=b", "columns: 'prompt' is given twice"),
        ("sft MODEL --lora_r 8", "lora_r takes effect only with --use_peft"),
        ("sft MODEL --center_rewards_coefficient 0.1", "is for reward models"),
        ("reward MODEL --no_completion_only_loss", "is for SFT"),
        ("sft MODEL", "There is no file or folder"),
    ],
)
def test_flags_that_cannot_work_are_refused_by_name(base, tmp_path, capsys, flags, message):
    files = f"--model_name_or_path {base} --dataset_name {tmp_path}/none.jsonl --output_dir out"
    if "coefficient" in flags or "completion" in flags:
        rows = write_rows(tmp_path / "rows.jsonl", [{"text": "w0"}])
        files = files.replace(f"{tmp_path}/none.jsonl", str(rows))
    assert main(flags.replace("MODEL", files).split()) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_help_lists_every_flag_with_its_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "python -m ppo_core.supervised sft|reward" in text
    assert "OUTPUT_DIR Folder for the trained model and its tokenizer, metrics.jsonl" in text
    assert "--use_peft" in text
    assert "--center_rewards_coefficient" in text
    assert "tokens of prompt plus response. Also --max_seq_length. (default: 512)" in text
    assert "metrics.jsonl, and checkpoints. Required." in text


SFT = """
    --learning_rate 2.0e-5 --num_train_epochs 1.0 --per_device_train_batch_size 2
    --gradient_accumulation_steps 8 --eval_strategy no --assistant_only_loss True
    --max_seq_length 64 --use_peft --lora_r 32 --lora_alpha 16 --lora_task_type CAUSAL_LM
    --dataset_train_split train --gradient_checkpointing
"""

REWARD = """
    --per_device_train_batch_size 8 --num_train_epochs 1 --gradient_checkpointing True
    --learning_rate 1.0e-5 --eval_strategy no --max_length 2048 --disable_dropout false
    --center_rewards_coefficient 0.01 --lora_task_type SEQ_CLS --dtype float32
"""


def test_the_flags_of_trls_sft_script_have_their_meaning_here():
    _, config, lora = parse_supervised("sft", [*REQUIRED, *SFT.split()])
    assert config == SupervisedConfig(
        learning_rate=2e-5,
        num_epochs=1,
        batch_size=2,
        gradient_accumulation_steps=8,
        max_length=64,
        gradient_checkpointing=True,
    )
    assert (lora.use_peft, lora.lora_r, lora.lora_alpha) == (True, 32, 16)
    _, config, _ = parse_supervised("sft", [*REQUIRED, "--assistant_only_loss", "False"])
    assert not config.completion_only_loss


def test_the_flags_of_trls_reward_script_have_their_meaning_here():
    _, config, _ = parse_supervised("reward", [*REQUIRED, *REWARD.split()])
    assert config == SupervisedConfig(
        learning_rate=1e-5,
        batch_size=8,
        max_length=2048,
        gradient_checkpointing=True,
        center_rewards_coefficient=0.01,
    )


def test_no_refused_flag_of_trl_is_a_flag_or_an_alias_here():
    kinds = (SupervisedArguments, SupervisedConfig, SupervisedLoraArguments)
    flags = {field.name for kind in kinds for field in fields(kind)}
    assert set(SUPERVISED_ALIASES.values()) <= flags
    assert not flags & {*SUPERVISED_ALIASES, *SUPERVISED_INSTEAD}
    assert not {*SUPERVISED_ALIASES} & {*SUPERVISED_INSTEAD}


@pytest.mark.parametrize(
    ("flags", "accepted"),
    [
        ("--save_strategy no", True),
        ("--save_strategy steps --save_steps 5", True),
        ("--save_strategy no --save_steps 5", False),
        ("--save_strategy steps", False),
    ],
)
def test_a_save_strategy_must_agree_with_save_steps(flags: str, accepted: bool):
    if accepted:
        _, config, _ = parse_supervised("sft", [*REQUIRED, *flags.split()])
        assert config.save_steps == (5 if "--save_steps" in flags else 0)
    else:
        with pytest.raises(ConfigError, match="set only save_steps"):
            parse_supervised("sft", [*REQUIRED, *flags.split()])
