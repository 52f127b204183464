"""Passwords, keys and tokens in texts and settings: nothing shows them, and nothing takes them."""

import base64
import html
import json
import shlex
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from metaflow import metaflow_git

from metaflow_glue.metaflow_secrets import keep_secrets_from_metaflow, redacted_exception
from pipeline.inputs.json_lines import json_line, write_jsonl
from pipeline.judges.openai_model import OpenAIModel
from pipeline.results.report_files import write_report
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.make_settings import make_settings
from pipeline.tracking.journal import Journal
from pipeline.tracking.mlflow_client import check_registry
from pipeline.tracking.run_log import RunLog
from ppo_core.config.argument_parser import parse_arguments
from ppo_core.config.ppo_config import PPOConfig
from ppo_core.config.script_arguments import ModelArguments, ScriptArguments
from ppo_core.distributed.process import ERROR_FILE, reported_errors
from ppo_core.errors import ConfigError, JudgeError, ModelError
from ppo_core.errors.redaction import redact
from serving.champion import champion_version
from tests.helpers.inputs.sample_reports import reward_report
from tests.helpers.servers.fault_server import fault_server, refuse, say
from tests.helpers.servers.mlflow_store import tracking_to

CANARY = "canary7Qx-plainText"
ODD = 'canary7Qx/p@ss w"ord+&<1>'
"""A password with characters that URLs, JSON and HTML write in another way."""

LINES = "-----BEGIN KEY-----\ncanary7QxLineOne\ncanary7QxLineTwo\n-----END KEY-----"

FORMS = {
    "plain": ODD,
    "in a URL": quote(ODD, safe=""),
    "in a path": quote(ODD),
    "in a form": quote_plus(ODD),
    "in JSON": json.dumps(ODD),
    "in HTML": html.escape(ODD),
    "in Python": repr(ODD),
    "after a word": f"x{ODD}",
    "twice": ODD + ODD,
}

VARIABLES = {
    "key": ("OPENAI_API_KEY", CANARY, CANARY),
    "numbered key": ("SERVICE_KEY_2", CANARY, CANARY),
    "token": ("HF_TOKEN", CANARY, CANARY),
    "lower case": ("my_service_token", CANARY, CANARY),
    "secret": ("CLIENT_SECRET", CANARY, CANARY),
    "access key": ("AWS_SECRET_ACCESS_KEY", CANARY, CANARY),
    "session": ("AWS_SESSION_TOKEN", CANARY, CANARY),
    "password": ("PGPASSWORD", CANARY, CANARY),
    "credentials": ("SERVICE_CREDENTIALS", CANARY, CANARY),
    "spaces around": ("OPENAI_API_KEY", f" {CANARY}\n", CANARY),
    "several lines": ("PRIVATE_KEY", LINES, "canary7QxLineTwo"),
    "database": ("DATABASE_URL", f"postgresql://me:{CANARY}@host/db", CANARY),
    "slash in password": ("DATABASE_URL", f"postgresql://me:a/b{CANARY}@host/db", f"a/b{CANARY}"),
    "at sign later": ("DATABASE_URL", f"mysql://me:{CANARY}@host/db?owner=x@y", CANARY),
    "no user": ("REDIS_URL", f"redis://:{CANARY}@host:1/0", CANARY),
    "quoted in the address": ("MLFLOW_TRACKING_URI", f"http://me:{quote(ODD, '')}@h", ODD),
    "token in the address": ("INDEX_URL", f"https://{CANARY}@host/simple", CANARY),
    "token in a query": ("DATA_URL", f"https://host/rows?x=1&token={CANARY}", CANARY),
    "two addresses": ("NODES", f"http://a:b@host,http://me:{CANARY}@host", CANARY),
    "connection string": ("STORE", f"AccountName=x;AccountKey={CANARY};y=z", CANARY),
    "proxy": ("HTTPS_PROXY", f"http://me:{CANARY}@proxy:8080", CANARY),
}

TOKENS = {
    "hub": "hf_canaryQxCanaryQxCanaryQx01",
    "openai": "sk-canaryQx0123456789",
    "openai project": "sk-proj-canaryQx_0123456789",
    "github": "ghp_canaryQx0123456789",
    "github app": "ghs_canaryQx0123456789",
    "fine-grained": "github_pat_canaryQx_0123456789",
    "gitlab": "glpat-canaryQx-0123456789",
    "slack": "xoxb-canaryQx-0123456789",
    "aws": "AKIACANARYQX01234567",
    "jwt": "eyJcanaryQx0123.eyJcanaryQx0123.canaryQx",
    "bearer": "Authorization: Bearer canaryQx.0123456789",
    "basic": f"'authorization': 'Basic {base64.b64encode(b'me:canaryQx').decode()}'",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_secret_is_masked_in_every_form(form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVICE_PASSWORD", ODD)
    assert "canary" not in redact(f"It failed with ({FORMS[form]}).")


@pytest.mark.parametrize("case", VARIABLES)
def test_a_secret_of_a_variable_is_masked(case: str, monkeypatch: pytest.MonkeyPatch):
    name, value, secret = VARIABLES[case]
    monkeypatch.setenv(name, value)
    assert redact(f"It failed with {secret}.") == "It failed with (hidden)."


@pytest.mark.parametrize("kind", TOKENS)
def test_a_token_is_masked_by_its_form(kind: str):
    shown = redact(f"It failed: {TOKENS[kind]}, and x%3D{TOKENS[kind]}")
    assert "canary" not in shown.lower()
    assert base64.b64encode(b"me:canaryQx").decode() not in shown


# Settings

REFUSED = {
    "address of the model": {"policy": f"https://me:{CANARY}@host/model"},
    "token in an address": {"preferences": f"https://{CANARY}@host/pairs.jsonl"},
    "query": {"prompts": f"https://host/prompts.jsonl?token={CANARY}"},
    "signed address": {"eval_prompts": f"https://host/x?X-Amz-Signature={CANARY}&a=b"},
    "path with a key": {"judge": "python:/keys/hf_canary7QxCanary7Qx/judge.py:judge"},
    "value of a variable": {"reward_model": f"models/{ODD}"},
    "address of the judge": {"judging": {"base_url": f"http://me:{CANARY}@host/v1"}},
    "address of vLLM": {"ppo": {"vllm_server_base_url": f"http://me:{CANARY}@host"}},
    "hub token": {"ppo": {"hub_token": CANARY}},
    "unknown setting": {"judging": {"api_key": CANARY}},
    "list": {"lora": {"target_modules": ["q_proj", f"http://me:{CANARY}@host"]}},
    "text": {"judging": {"criterion": f"Ask with sk-{CANARY}-0123456789"}},
}


@pytest.fixture
def secret_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVICE_PASSWORD", ODD)


def is_clean(error: BaseException) -> bool:
    """Whether the message holds no canary, and the traceback holds none beside our own lines."""
    return "canary7Qx" not in str(error) + repr(error)


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_with_a_secret_is_refused_by_name(case: str, secret_variable: None):
    table = REFUSED[case]
    (name,) = table
    with pytest.raises(ConfigError, match=rf"^{name}.* environment variable") as refused:
        make_settings(table, {})
    assert is_clean(refused.value)


@pytest.mark.parametrize(
    "line",
    [
        f"--policy https://me:{CANARY}@host/x",
        f"--policy=https://me:{CANARY}@host/x",
        f"--tag x --tag url:http://me:{CANARY}@host",
        f"--config-value settings 'policy = \"https://me:{CANARY}@host\"'",
        "--judge openai:sk-canary7Qx-0123456789",
        f"--judge 'openai:{ODD}'",
    ],
)
def test_a_secret_on_the_command_line_is_refused_by_its_flag(line: str, secret_variable: None):
    words = shlex.split(line)
    flag = words[0].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{flag} holds") as refused:
        keep_secrets_from_metaflow(["run", *words])
    assert is_clean(refused.value)


def test_a_secret_as_the_name_of_a_setting_is_refused(secret_variable: None):
    with pytest.raises(ConfigError, match="name of a setting") as refused:
        make_settings({"judging": {ODD: 1}}, {})
    assert is_clean(refused.value)


def test_a_secret_in_a_parameter_of_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("METAFLOW_RUN_POLICY", f"https://me:{CANARY}@host/x")
    with pytest.raises(ConfigError, match=r"^METAFLOW_RUN_POLICY holds") as refused:
        keep_secrets_from_metaflow(["run"])
    assert is_clean(refused.value)


@pytest.mark.parametrize("kind", ["flags", "toml", "json"])
def test_a_secret_in_the_settings_of_a_training_is_refused(kind: str, tmp_path: Path):
    address = f"http://me:{CANARY}@host/model"
    argv = [f"--model_name_or_path={address}"]
    if kind == "toml":
        argv = [str(tmp_path / "settings.toml")]
        Path(argv[0]).write_text(f'model_name_or_path = "{address}"')
    if kind == "json":
        argv = [str(tmp_path / "settings.json")]
        Path(argv[0]).write_text(json.dumps({"model_name_or_path": address}))
    with pytest.raises(ConfigError, match=r"^model_name_or_path holds") as refused:
        parse_arguments([PPOConfig, ScriptArguments, ModelArguments], argv)
    assert is_clean(refused.value)


def test_the_hub_token_of_a_training_alone_may_be_given():
    (config,) = parse_arguments([PPOConfig], ["--hub_token=hf_canary7QxCanary7Qx"])
    assert config.hub_token == "hf_canary7QxCanary7Qx"


# Errors, and what is stored


@pytest.mark.parametrize("ask", [champion_version, check_registry], ids=["service", "flow"])
def test_an_error_of_the_registry_shows_no_password(ask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with (
        tracking_to(f"http://me:{CANARY}@127.0.0.1:1", retries=0),
        pytest.raises(ModelError) as error,
    ):
        ask("policy")
    assert is_clean(error.value)
    if ask is champion_version:
        # A service redacts no output, so the traceback must be clean by itself.
        assert "canary7Qx" not in "".join(traceback.format_exception(error.value))


def test_a_key_that_a_server_repeats_is_shown_and_stored_nowhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    replies = {}
    with fault_server([say(f"A, by {CANARY}"), refuse(401, "x" * 295 + CANARY)]) as server:
        model = OpenAIModel("model", JudgingConfig(base_url=server.url, retries=0))
        model.ask([[{"role": "user", "content": "?"}]], replies.__setitem__)
        with pytest.raises(JudgeError) as error:
            model.probe()
    assert replies[0].text == "A, by (hidden)"
    assert "canary" not in str(error.value)


def test_the_texts_of_reports_are_masked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVICE_PASSWORD", CANARY)
    log = RunLog(Journal(tmp_path / "journal"), "1")
    log.set_tags({"judge": CANARY})
    log.log_json({"judge": CANARY}, "summary.json")
    log.log_table([{"reason": CANARY}], "samples.json")
    odd = {"token": ["abc"], "cause": ValueError(CANARY), "tokens": 5}
    write_jsonl(tmp_path / "judgements.jsonl", [{"reason": CANARY, "odd": odd}])
    assert (
        json_line({"odd": odd})
        == '{"odd": {"token": ["(hidden)"], "cause": "(hidden)", "tokens": 5}}\n'
    )
    write_report(tmp_path / "report.json", replace(reward_report(), reasons=[CANARY]))
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len([text for text in files if "(hidden)" in text]) == 5
    assert not [text for text in files if CANARY in text]


def test_the_report_of_a_failed_process_is_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setenv("SERVICE_PASSWORD", CANARY)
    with pytest.raises(RuntimeError), reported_errors():
        raise RuntimeError(f"no model at http://me:it@host: {CANARY}")
    report = (tmp_path / "error.json").read_text()
    assert "http://host: (hidden)" in report
    assert CANARY not in report and "me:it" not in report


def test_metaflow_stores_exceptions_without_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVICE_PASSWORD", CANARY)
    try:
        raise RuntimeError(f"{CANARY} http://me:it@host")
    except RuntimeError as error:
        stored = redacted_exception(error)
    assert "RuntimeError: (hidden) http://host" in str(stored)
    assert "canary7Qx" not in str(vars(stored)) and "me:it" not in str(vars(stored))


def test_metaflow_reads_the_git_remote_without_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    remote = f"https://x-access-token:{CANARY}@host/project.git"
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "remote", "add", "origin", remote], cwd=tmp_path, check=True)
    monkeypatch.setattr(metaflow_git, "_git_info_cache", None)
    monkeypatch.setattr(metaflow_git, "get_repository_info", metaflow_git.get_repository_info)
    monkeypatch.setattr("metaflow.task.MetaflowExceptionWrapper", None)
    keep_secrets_from_metaflow(["run"])
    assert metaflow_git.get_repository_info(tmp_path)["repo_url"] == "https://host/project.git"


def test_a_settings_file_with_a_secret_is_refused_before_metaflow_stores_it():
    code = (
        "import sys; sys.path[:0] = ['.', 'flows']; import rlhf; "
        f"rlhf.parse_toml('[judging]\\nbase_url = \"http://me:{CANARY}@host\"')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert "judging.base_url holds an address with a user or password" in ran.stderr
