"""`python -m ppo_core.supervised`: runs from a shell, and refused flags."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ppo_core.supervised.supervised_cli import main
from tests.helpers.chat import make_chat_tokenizer, say
from tests.helpers.forked_python import Ended, run_python
from tests.helpers.tiny import make_policy


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
    options = ["--num_epochs", 20, "--learning_rate", 1e-2, "--centre_rewards_coefficient", 0.01]
    ran = start("reward", *flags, *options, "--use_peft", "--lora_target_modules", "q_proj")
    assert ran.returncode == 0, ran.stderr
    assert (folder / "adapter" / "adapter_model.safetensors").exists()
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    chosen, rejected = model(torch.tensor([[3, 4, 1], [3, 5, 1]])).logits[:, 0].tolist()
    assert chosen > rejected + 0.5


def test_bad_input_is_one_line_on_standard_error_and_exit_code_1(base, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "w0", "answer": "w1"}])
    folder = tmp_path / "sft"
    ran = start(
        *("sft", "--model_name_or_path", base, "--dataset_name", rows, "--output_dir", folder)
    )
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert "Row 0: there is no column 'completion', only: prompt, answer" in ran.stderr
    assert not folder.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "'' is not a training. Begin with sft or reward"),
        ("dpo", "'dpo' is not a training"),
        ("sft", "arguments are required: --model_name_or_path"),
        ("sft MODEL --batch_size 0", "batch_size=0 must be a whole number, at least 1"),
        ("sft MODEL --batch_size many", "invalid int value: 'many'"),
        ("sft MODEL --max_steps 5", "Unknown: --max_steps 5."),
        ("sft MODEL --lora_r 8", "lora_r takes effect only with --use_peft"),
        ("sft MODEL --centre_rewards_coefficient 0.1", "is for reward models"),
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
    assert "OUTPUT_DIR Folder for the trained model and its tokenizer." in text
    assert "--use_peft" in text
    assert "--centre_rewards_coefficient" in text
