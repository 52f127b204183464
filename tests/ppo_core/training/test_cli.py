"""`python -m ppo_core`: TRL's documented commands, its help, and what it refuses."""

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_core import ConfigError, DataError, ModelError, TrainingError, get_peft_config
from ppo_core.config.argument_parser import field_docs, parse_arguments
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.io.progress_bar import PROGRESS_FILE
from ppo_core.models.files.critic_files import load_critic
from ppo_core.training.cli import load_prompts, load_reward, load_start, train_ppo
from tests.helpers.models.model_hub import model_hub
from tests.helpers.models.tiny import make_classifier, make_policy, make_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.runs.forked_python import Ended, run_python
from tests.helpers.servers.full_disk import full_disk

KINDS = (PPOConfig, ScriptArguments, ModelArguments)

SENTIMENT = """
    --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style
    --dataset_train_split descriptiveness
    --learning_rate 3e-6
    --num_ppo_epochs 1
    --num_mini_batches 1
    --output_dir models/minimal/ppo
    --per_device_train_batch_size 64
    --gradient_accumulation_steps 1
    --total_episodes 10000
    --model_name_or_path EleutherAI/pythia-1b-deduped
    --missing_eos_penalty 1.0
"""
SENTIMENT_SHARDED = f"""
    {SENTIMENT}
    --sft_model_path EleutherAI/pythia-1b-deduped
    --reward_model_path EleutherAI/pythia-1b-deduped
    --local_rollout_forward_batch_size 1
"""
TLDR = """
    --dataset_name trl-lib/tldr
    --dataset_test_split validation
    --learning_rate 3e-6
    --output_dir pythia-1b-deduped-tldr-preference-sft-trl-style-ppo
    --per_device_train_batch_size 16
    --gradient_accumulation_steps 4
    --total_episodes 30000
    --model_name_or_path EleutherAI/pythia-1b-deduped
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr
    --missing_eos_penalty 1.0
    --stop_token eos
    --response_length 53
    --eval_strategy steps
    --eval_steps 100
"""


def parse(command: str) -> list:
    return parse_arguments(KINDS, command.split())


# --- Parsing ---------------------------------------------------------------------


def test_the_documented_sentiment_command_parses():
    config, script, model = parse(SENTIMENT_SHARDED)
    assert script.dataset_train_split == "descriptiveness"
    assert config.learning_rate == 3e-6
    assert config.total_episodes == 10_000
    assert config.missing_eos_penalty == 1.0
    assert config.local_rollout_forward_batch_size == 1
    assert config.reward_model_path == model.model_name_or_path == "EleutherAI/pythia-1b-deduped"


def test_the_documented_tldr_command_parses():
    config, script, _ = parse(TLDR)
    assert (config.stop_token, config.response_length) == ("eos", 53)
    assert (config.eval_strategy, config.eval_steps) == ("steps", 100)
    assert script.dataset_test_split == "validation"


def test_older_names_of_flags_have_their_meaning_here():
    config, _, model = parse(
        "--dataset_name x --torch_dtype bfloat16 --use_peft --evaluation_strategy steps "
        "--total_episodes 1e4 --dataset-config main"
    )
    assert (model.dtype, config.eval_strategy, config.total_episodes) == (
        "bfloat16",
        "steps",
        10_000,
    )


def test_a_command_without_settings_gives_their_defaults():
    config, script, model = parse("--dataset_name prompts")
    assert config == PPOConfig()
    assert script == ScriptArguments(dataset_name="prompts")
    assert model == ModelArguments()


def test_a_file_stands_for_its_flags_and_flags_win_over_it(tmp_path: Path):
    file = tmp_path / "settings.toml"
    file.write_text(
        'dataset_name = "prompts"\nlearning_rate = 1e-6\nbf16 = true\nseed = 4\n'
        'report_to = ["mlflow", "wandb"]\nds3_gather_for_generation = false\n'
    )
    config, script, _ = parse(f"{file} --seed 5")
    assert script.dataset_name == "prompts"
    assert config == PPOConfig(
        learning_rate=1e-6,
        bf16=True,
        seed=5,
        report_to=["mlflow", "wandb"],
        ds3_gather_for_generation=False,
    )


def test_small_negative_numbers_are_values(tmp_path: Path):
    file = tmp_path / "settings.toml"
    file.write_text("reward_weights = [1, -1e-5]\n")
    for command in (str(file), "--reward_weights 1 -1e-5", "--reward_weights 1 -1E-05"):
        config, *_ = parse(f"{command} --dataset_name x")
        assert config.reward_weights == [1, -1e-5]


def test_what_happens_anyway_is_accepted_as_a_flag():
    config, *_ = parse("--dataset_name x --fp16 False --tf32 null --remove-unused-columns=false")
    assert config == PPOConfig()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fp16", "fp16=True is not supported: set bf16=True"),
        ("--lr 3e-6", "no setting --lr, .* Did you mean --learning_rate"),
        ("--model gpt2", "Did you mean --model_name_or_path"),
        ("--truncate_token eos", "--truncate_token='eos' is not supported: set stop_token"),
        ("--total_episodes 1.5", "argument --total_episodes.*: invalid int value: '1.5'"),
        ("--fp16 true", "fp16=True is not supported"),
        ("--max_steps=0", "max_steps=0 must be a whole number, at least 1"),
        ("--lora_task_type SEQ_CLS", "lora_task_type='SEQ_CLS' is not supported"),
        ("--trust_remote_code True", "code from a model's repository is never run"),
        ("--learning_rat 3e-6", "no setting --learning_rat, .* Did you mean --learning_rate"),
        ("--seed one", "argument --seed: invalid int value: 'one'"),
        ("--seed 1 stray", "'stray' belongs to no flag"),
        ("--kl_estimator k9", "argument --kl_estimator.*invalid choice"),
        ("--temperature 0", "temperature=0.0 must be above 0"),
        ("--lora_r 8", "lora_r takes effect only with --use_peft"),
        ("--load_in_4bit", "load_in_4bit=True would reduce the precision"),
        ("--use_peft --bnb_4bit_quant_type fp4", "takes effect only with --load_in_4bit"),
        ("--dtype bfloat16", "dtype='bfloat16' would reduce the precision"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(flags: str, words: str):
    with pytest.raises(ConfigError, match=words):
        parse(f"--dataset_name x {flags}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed = ", "cannot be read"),
        ("[ppo]\nseed = 1", r"has a table \[ppo\]"),
        ("fp16 = true", "fp16=True is not supported"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, words: str):
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse(f"{file} --dataset_name x")


def test_a_missing_file_is_refused():
    with pytest.raises(ConfigError, match=r"'none\.toml' cannot be read"):
        parse("none.toml")


@pytest.mark.parametrize("kind", KINDS)
def test_every_flag_has_a_docstring_for_its_help(kind: type):
    assert {field.name for field in fields(kind)} == set(field_docs(kind))


def test_a_docstring_is_the_text_below_its_field_in_one_line():
    assert field_docs(ScriptArguments)["dataset_train_split"] == "Split to train on."
    assert "\n" not in field_docs(PPOConfig)["total_episodes"]


def test_a_policy_is_loaded_in_the_precision_of_its_files(tmp_path: Path):
    make_policy().to(torch.bfloat16).save_pretrained(tmp_path)
    _, _, model = parse("--dataset_name x")
    assert load_start(str(tmp_path), model).dtype == torch.bfloat16
    _, _, adapted = parse("--dataset_name x --use_peft")
    assert load_start(str(tmp_path), adapted).dtype == torch.float32


# --- Running ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a tiny `policy` and a tiny `reward` model, tokenizers with them."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in [("policy", make_policy()), ("reward", make_classifier())]:
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder of prompts with the splits of TRL's commands."""
    folder = tmp_path_factory.mktemp("prompts")
    rows = Dataset.from_list([{"prompt": f"w{i} w{i + 1}", "completion": " w1"} for i in range(8)])
    splits = dict.fromkeys(("descriptiveness", "train", "validation"), rows)
    DatasetDict(splits).save_to_disk(folder)
    return folder


def test_few_prompts_are_all_trained_on(data):
    train, held_out = load_prompts(
        PPOConfig(), ScriptArguments(dataset_name=str(data)), make_tokenizer(), None
    )
    assert (len(train), held_out) == (8, None)


def test_a_json_file_holds_values_as_they_are(tmp_path):
    file = tmp_path / "settings.json"
    given = {"stop_token": None, "learning_rate": 3e-7, "reward_gain": 0.1, "lora_r": 4}
    file.write_text(json.dumps(given | {"use_peft": True}))
    config, script, model = parse_arguments(KINDS, [str(file)])
    assert config == PPOConfig(stop_token=None, learning_rate=3e-7)
    assert script == ScriptArguments(reward_gain=0.1)
    assert model == ModelArguments(use_peft=True, lora_r=4)
    file.write_text('{"fp16": true}')
    with pytest.raises(ConfigError, match="fp16=True is not supported"):
        parse_arguments(KINDS, [str(file)])
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_arguments(KINDS, [str(file)])
    file.write_text("[3]")
    with pytest.raises(ConfigError, match="holds a list"):
        parse_arguments(KINDS, [str(file)])
    with pytest.raises(ConfigError, match=r"'--seed' .* a JSON file. .* can follow only a TOML"):
        parse_arguments(KINDS, [str(file), "--seed", "3"])


def test_prompts_that_leave_no_room_are_left_out_or_cut(tmp_path, capsys):
    file = tmp_path / "many.jsonl"
    rows = [{"prompt": "w1"}] * 99 + [{"prompt": "w1 w2 w3"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    script = ScriptArguments(dataset_name=str(file))
    config = PPOConfig(response_length=3)
    train, _ = load_prompts(config, script, make_tokenizer(), 5)
    assert len(train) == 99
    assert "left out: 1 with more than 2 tokens" in capsys.readouterr().err
    train, _ = load_prompts(config, replace(script, overlong="truncate"), make_tokenizer(), 5)
    assert train["prompt"][-1] == "w2 w3"
    with pytest.raises(DataError, match=r"set max_left_out=0.01 to go on"):
        load_prompts(config, replace(script, max_left_out=0.0), make_tokenizer(), 5)


def test_where_no_samples_are_shown_all_prompts_are_trained_on(tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"w{i}"}) for i in range(1001)))
    config = PPOConfig(num_sample_generations=0)
    train, held_out = load_prompts(
        config, ScriptArguments(dataset_name=str(file)), make_tokenizer(), None
    )
    assert (len(train), held_out) == (1001, None)


def test_the_last_100_of_many_prompts_are_held_out(tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"w{i}"}) for i in range(1001)))
    train, held_out = load_prompts(
        PPOConfig(), ScriptArguments(dataset_name=str(file)), make_tokenizer(), None
    )
    assert train["prompt"][-1] == "w900"
    assert held_out["prompt"][:] == [f"w{i}" for i in range(901, 1001)]


@pytest.mark.parametrize(("watched", "names"), [(4, ["w0", "w2", "w5", "w7"]), (99, None)])
def test_watched_prompts_are_at_equal_distances_and_trained_on(watched, names, tmp_path):
    file = tmp_path / "ten.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"w{i}"}) for i in range(10)))
    script = ScriptArguments(dataset_name=str(file), watched_prompts=watched)
    train, shown = load_prompts(PPOConfig(), script, make_tokenizer(), None)
    assert len(train) == 10
    assert shown["prompt"][:] == (names or train["prompt"][:])


@pytest.mark.parametrize("other", [{"eval_strategy": "steps"}, {"num_sample_generations": 0}])
def test_watched_prompts_that_would_be_ignored_are_refused(other, data):
    script = ScriptArguments(dataset_name=str(data), watched_prompts=1)
    with pytest.raises(ConfigError, match="watched_prompts=1 would be ignored: it needs"):
        load_prompts(PPOConfig(**other), script, make_tokenizer(), None)


def test_evaluation_reads_the_test_split(data):
    script = ScriptArguments(dataset_name=str(data), dataset_test_split="validation")
    _, held_out = load_prompts(PPOConfig(eval_strategy="steps"), script, make_tokenizer(), None)
    assert len(held_out) == 8


def test_a_trained_reward_model_is_taken_as_it_is(models, recwarn):
    reward = load_reward(str(models / "reward"), str(models / "policy"), seed=1)
    trained = AutoModelForSequenceClassification.from_pretrained(models / "reward")
    assert torch.equal(reward.model.score.weight, trained.score.weight)
    assert not [one for one in recwarn if "RANDOM" in str(one.message)]


@pytest.mark.parametrize("given", [True, False])
def test_without_a_trained_head_a_warning_names_the_model(models, given: bool):
    policy = str(models / "policy")
    words = "is not a reward model" if given else "No reward_model_path"
    with pytest.warns(UserWarning, match=f"{words}.* gets a score head with RANDOM weights"):
        reward = load_reward(policy if given else None, policy, seed=1)
    with pytest.warns(UserWarning, match="RANDOM"):
        again = load_reward(policy, policy, seed=1)
    assert torch.equal(reward.model.score.weight, again.model.score.weight)


def test_the_random_head_gives_scores_near_0_that_differ(models):
    with pytest.warns(UserWarning, match="RANDOM"):
        reward = load_reward(None, str(models / "policy"), seed=1)
    # 32 weights drawn with a standard deviation of 1 / sqrt(32 + 1) = 0.17.
    assert 0.1 < reward.model.score.weight.std().item() < 0.25
    scores = reward.score_texts(["w1", "w2"], ["w3", "w4"])
    assert scores[0] != scores[1]


def test_the_reward_model_is_read_as_it_is_told(models):
    reward = load_reward(
        str(models / "reward"), str(models / "policy"), 1, bias=0.5, gain=2.0, end_of_text=False
    )
    assert (reward.bias, reward.gain, reward.end_of_text) == (0.5, 2.0, False)


def test_the_revision_of_the_policy_is_read_wherever_its_files_are(models, data, tmp_path):
    script = ScriptArguments(dataset_name=str(data), critic_path=str(tmp_path / "gone"))
    model = ModelArguments(model_name_or_path="org/policy", model_revision="v1")
    with model_hub({"org/policy@v1": models / "policy"}, tmp_path / "cache") as hub:
        # Loading the critic follows loading tokenizer, policy and reward.
        with (
            pytest.warns(UserWarning, match="RANDOM"),
            pytest.raises(ModelError, match=r"no folder '.*gone'"),
        ):
            train_ppo(PPOConfig(output_dir=str(tmp_path / "out")), script, model)
        assert hub.asked == {"org/policy@v1"}


def test_a_policy_that_would_not_be_uploaded_is_refused(tmp_path):
    config = PPOConfig(output_dir=str(tmp_path / "out"), push_to_hub=True)
    with pytest.raises(ConfigError, match=r"push_to_hub=True uploads only a policy.*policy_dir="):
        train_ppo(config, ScriptArguments(policy_dir=str(tmp_path / "p")), ModelArguments())


def test_the_adapters_are_as_the_flags_say():
    _, _, model = parse("--use_peft --lora_r 4 --lora_target_modules all-linear --use_rslora")
    config = get_peft_config(model)
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 32, 0.0)
    assert (config.target_modules, config.use_rslora) == ("all-linear", True)


def test_all_linear_beside_other_names_is_refused():
    with pytest.raises(ConfigError, match=r"lora_target_modules=.* must be the only entry"):
        parse("--use_peft --lora_target_modules all-linear q_proj")


def test_a_policy_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"There is no folder '.*nowhere'\. Check"):
        load_start(str(tmp_path / "nowhere"), ModelArguments())


def command(documented: str, **replaced: object) -> list[str]:
    """A documented command with some of its values replaced."""
    words = documented.split()
    for name, value in replaced.items():
        words[words.index(f"--{name}") + 1] = str(value)
    return words


def run(*words: str, check: bool = True) -> Ended:
    """Run `python -m ppo_core`."""
    ran = run_python("-m", "ppo_core", *words, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert not check or ran.returncode == 0, ran.stderr[-3000:]
    return ran


def run_anew(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a module in a process that has imported nothing."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | offline,
    )
    assert not check or ran.returncode == 0, ran.stderr[-3000:]
    return ran


def changed(output: Path, start: Path) -> bool:
    """Whether the saved policy has other weights than the one it started from."""
    after, before = (AutoModelForCausalLM.from_pretrained(each) for each in (output, start))
    pairs = zip(after.parameters(), before.parameters(), strict=True)
    return any(not torch.equal(one, other) for one, other in pairs)


def test_the_sentiment_command_runs_and_warns_of_its_random_reward(models, data, tmp_path):
    ran = run(
        *command(
            SENTIMENT,
            dataset_name=data,
            model_name_or_path=models / "policy",
            output_dir=tmp_path,
            per_device_train_batch_size=4,
            total_episodes=8,
        ),
        "--response_length=6",
    )
    assert "RANDOM weights" in ran.stderr
    assert changed(tmp_path, models / "policy")


def test_the_tldr_command_runs(models, data, tmp_path):
    ran = run(
        *command(
            TLDR,
            dataset_name=data,
            model_name_or_path=models / "policy",
            sft_model_path=models / "policy",
            reward_model_path=models / "reward",
            output_dir=tmp_path,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            total_episodes=8,
            response_length=6,
            eval_steps=1,
        ),
    )
    assert "RANDOM" not in ran.stderr
    assert changed(tmp_path, models / "policy")
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.slow
def test_the_sharded_sentiment_command_runs_under_accelerate_launch(models, data, tmp_path):
    launch = tmp_path / "two_processes.yaml"
    launch.write_text(
        # MULTI_CPU would ask for mpirun; this starts torchrun, and there is no GPU to be found.
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nuse_cpu: false\n"
        "mixed_precision: 'no'\nnum_machines: 1\nnum_processes: 2\nmachine_rank: 0\n"
        "main_process_port: 0\n"
    )
    run_anew(
        *("accelerate.commands.launch", "--config_file", str(launch), "-m", "ppo_core"),
        *command(
            SENTIMENT_SHARDED,
            dataset_name=data,
            model_name_or_path=models / "policy",
            sft_model_path=models / "policy",
            reward_model_path=models / "reward",
            output_dir=tmp_path / "out",
            per_device_train_batch_size=2,
            total_episodes=8,
        ),
        "--response_length=6",
    )
    assert changed(tmp_path / "out", models / "policy")


SMALL = "--per_device_train_batch_size 4 --total_episodes 4 --response_length 6".split()


def test_a_run_without_checkpoints_saves_its_policy_in_a_new_folder(models, data, tmp_path):
    new = tmp_path / "not" / "yet"
    flags = f"--dataset_name {data} --model_name_or_path {models / 'policy'} --output_dir {new}"
    reward = f"--reward_model_path {models / 'reward'} --save_strategy no"
    run(*SMALL, *flags.split(), *reward.split())
    assert changed(new, models / "policy")
    assert "backend" in json.loads((new / "self-check.json").read_text())


def test_a_run_starts_from_the_critic_of_another_run(models, data, tmp_path):
    model = f"--model_name_or_path {models / 'policy'} --reward_model_path {models / 'reward'}"

    def train(output: Path, *words: str) -> dict[str, torch.Tensor]:
        flags = f"--dataset_name {data} --output_dir {output} --critic_dir {output / 'critic'}"
        run(*SMALL, *model.split(), *flags.split(), "--save_strategy=no", *words)
        return load_critic(output / "critic").state_dict()

    first = train(tmp_path / "first")
    # With this rate, the second run changes nothing.
    still = "--learning_rate=1e-12"
    critic = ("--critic_path", str(tmp_path / "first" / "critic"))
    assert_close(train(tmp_path / "second", still, *critic), first)
    cold = train(tmp_path / "cold", still)
    assert any(not torch.allclose(cold[name], first[name]) for name in first)


def test_a_run_without_a_critic_of_its_own_saves_none(models, data, tmp_path):
    flags = f"--dataset_name {data} --model_name_or_path {models / 'policy'} --shared_critic true"
    folders = f"--output_dir {tmp_path / 'out'} --critic_dir {tmp_path / 'critic'}"
    ran = run(*SMALL, *flags.split(), *folders.split(), check=False)
    assert ran.returncode == 1
    assert "a critic on the policy's own backbone, so no critic can be saved" in ran.stderr


@pytest.mark.parametrize("flag", ["--output_dir", "--policy_dir", "--critic_dir"])
def test_a_file_in_the_place_of_a_folder_is_refused_before_anything_is_loaded(
    flag, models, data, tmp_path
):
    (tmp_path / "file").touch()
    flags = f"--dataset_name {data} --model_name_or_path {models / 'policy'} --save_strategy no"
    ran = run(
        *SMALL,
        *flags.split(),
        *("--output_dir", str(tmp_path / "out"), flag, str(tmp_path / "file")),
        check=False,
    )
    assert ran.returncode == 1
    assert f"{flag[2:]}: nothing can be written into '{tmp_path / 'file'}'" in ran.stderr
    assert "RANDOM" not in ran.stderr


@pytest.mark.parametrize(("output", "policy"), [("out", "both"), ("both", None)])
def test_policy_and_critic_in_one_folder_are_refused(output, policy, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    critic = str(tmp_path / "x" / ".." / "both")
    script = ScriptArguments(dataset_name=str(data), policy_dir=policy, critic_dir=critic)
    with pytest.raises(ConfigError, match=r"critic_dir=.* is also the (policy|output)_dir, so"):
        train_ppo(PPOConfig(output_dir=output), script, ModelArguments())


class LostServerError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("lost_in", "changes"),
    [
        ("ppo_core.reporting.callbacks.Reporter.end", {}),
        ("ppo_core.training.export.push_folder", {"push_to_hub": True}),
    ],
)
def test_policy_and_critic_are_saved_although_a_server_is_lost_at_the_end(
    lost_in, changes, models, data, tmp_path, monkeypatch
):
    def lost(*_, **__):
        raise LostServerError

    monkeypatch.setattr(lost_in, lost)
    config = PPOConfig(
        output_dir=str(tmp_path / "out"),
        sft_model_path=str(models / "policy"),
        reward_model_path=str(models / "reward"),
        save_strategy="no",
        per_device_train_batch_size=4,
        total_episodes=4,
        response_length=6,
        **changes,
    )
    script = ScriptArguments(dataset_name=str(data), critic_dir=str(tmp_path / "critic"))
    with pytest.raises(LostServerError):
        train_ppo(config, script, ModelArguments())
    assert changed(tmp_path / "out", models / "policy")
    assert load_critic(tmp_path / "critic") is not None
    assert (tmp_path / "out" / "self-check.json").is_file()
    # The launcher of the flow reads in it that a long update makes progress.
    assert (tmp_path / "out" / PROGRESS_FILE).is_file()


def test_the_record_of_the_self_check_is_written_although_the_disk_is_full(models, data, tmp_path):
    config = PPOConfig(
        output_dir=str(tmp_path),
        sft_model_path=str(models / "policy"),
        reward_model_path=str(models / "reward"),
        save_strategy="no",
        per_device_train_batch_size=4,
        total_episodes=4,
        response_length=6,
    )
    script = ScriptArguments(dataset_name=str(data), critic_dir=str(tmp_path / "critic"))
    with full_disk(10_000), pytest.raises(TrainingError, match="File too large"):
        train_ppo(config, script, ModelArguments())
    assert not (tmp_path / "model.safetensors").exists()
    assert "backend" in json.loads((tmp_path / "self-check.json").read_text())


def test_a_run_goes_on_from_its_latest_checkpoint(models, data, tmp_path):
    flags = (
        f"--dataset_name {data} --model_name_or_path {models / 'policy'} --output_dir {tmp_path} "
        f"--reward_model_path {models / 'reward'} --per_device_train_batch_size 4 "
        "--total_episodes 8 --response_length 6 --save_steps 1"
    ).split()
    run(*flags)
    (whole,) = tmp_path.glob("*.safetensors")
    at_the_end = whole.read_bytes()
    newest = max(tmp_path.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    newest.rename(tmp_path / "put_aside")
    whole.unlink()
    run(*flags, "--resume_from_checkpoint", "latest")
    assert whole.read_bytes() == at_the_end


@pytest.mark.parametrize(
    "precision", ["--load_in_4bit", pytest.param("--load_in_8bit", marks=pytest.mark.slow)]
)
def test_adapters_on_a_quantised_base_are_trained_saved_and_resumed(
    models, data, tmp_path, precision: str
):
    pytest.importorskip("bitsandbytes")
    flags = (
        f"--dataset_name {data} --model_name_or_path {models / 'policy'} --output_dir {tmp_path} "
        f"--reward_model_path {models / 'reward'} --per_device_train_batch_size 4 "
        f"--total_episodes 8 --response_length 6 --save_steps 1 --use_peft {precision} "
        "--learning_rate 1e-2 --temperature 1.0"
    ).split()
    run(*flags)
    adapter, merged = tmp_path / "adapter/adapter_model.safetensors", tmp_path / "model.safetensors"
    at_the_end = (adapter.read_bytes(), merged.read_bytes())
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float32
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["val/first_ratio_error"] < 1e-5 for line in lines)
    (tmp_path / "checkpoint-2").rename(tmp_path / "put_aside")
    adapter.unlink()
    run(*flags, "--resume_from_checkpoint", "latest")
    assert (adapter.read_bytes(), merged.read_bytes()) == at_the_end


def test_prompts_have_to_be_named(models):
    ran = run("--model_name_or_path", str(models / "policy"), check=False)
    assert ran.returncode == 1
    assert ran.stderr.endswith(
        "ppo_core: There are no prompts. Set --dataset_name to a folder or hub id.\n"
    )


def test_bad_input_is_one_message_and_exit_code_1():
    ran = run_anew("ppo_core", "--dataset_name", "x", "--fp16", "true", check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("ppo_core: --fp16=True is not supported: set bf16=True")
    assert len(ran.stderr.splitlines()) == 1


def test_help_shows_the_docstrings():
    ran = run_anew("ppo_core", "--help")
    assert "Maximum tokens of a response, the stop token included." in " ".join(ran.stdout.split())
