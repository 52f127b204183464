"""Control characters in what files and servers hold: none reaches a terminal or a log."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import ppo_core.errors as errors
from metaflow_glue.metaflow_secrets import redacted_exception
from pipeline.judges.openai_model import OpenAIModel
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.make_settings import make_settings
from pipeline.storage.model_lease import Holder
from pipeline.tracking.mlflow_client import check_model_name
from ppo_core.checkpointing.lease import Lease
from ppo_core.config.row_settings import ReadOptions
from ppo_core.data.rows.describe import describe_reading
from ppo_core.data.rows.read_rows import read_rows
from ppo_core.errors import PPOError
from ppo_core.models.loading import load_config, load_policy, load_tokenizer
from tests.helpers.inputs.pipeline_inputs import write_model
from tests.helpers.paths import ROOT
from tests.helpers.servers.fault_server import fault_server, refuse

CONTROLS = {
    "color": "\x1b[31m",
    "concealed": "\x1b[8m",
    "erase the screen": "\x1b[2J",
    "erase the line": "\x1b[2K",
    "up": "\x1b[1A",
    "title": "\x1b]0;title\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "link": "\x1b]8;;http://evil\x1b\\text\x1b]8;;\x1b\\",
    "answer": "\x1b[6n",
    "reset": "\x1bc",
    "device string": "\x1bPq#0\x1b\\",
    "other screen": "\x1b[?1049h",
    "one byte of C1": "\x9b31m",
    "title of C1": "\x9d0;title\x9c",
    "carriage return": "\rfake",
    "backspace": "a\x08b",
    "bell": "\x07",
    "delete": "\x7f",
    "form feed": "\x0c",
    "shift out": "\x0e",
    "zero": "\0",
    "override": "\u202etxt.exe",
    "embedding": "\u202a",
    "isolate": "\u2066x\u2069",
    "line separator": "\u2028fake",
    "next line": "\x85fake",
    "half a character": "\ud83d",
}

NASTY = "x" + "".join(CONTROLS.values()) + "y"
IN_NAMES = "x" + "".join(text for text in CONTROLS.values() if "\0" not in text).replace("/", "")

BAD = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind is not Path]


@pytest.mark.parametrize("case", CONTROLS)
def test_no_error_of_the_project_holds_a_control_character(case: str):
    for kind in CLASSES:
        if issubclass(kind, PPOError):
            message = str(kind(f"line 1\n\tline 2 {CONTROLS[case]} end"))
            assert not BAD.search(message)
            assert message.startswith("line 1\n\tline 2 ")
            assert message.endswith(" end")


# --- Names in files and replies -----------------------------------------------------


def name_a_tensor(folder: Path) -> None:
    write_model(folder / "policy")
    tensors = load_file(folder / "policy" / "model.safetensors")
    tensors[IN_NAMES.replace("\ud83d", "")] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "policy" / "model.safetensors", metadata={"format": "pt"})
    load_policy(folder / "policy")


def name_a_shard(folder: Path) -> None:
    write_model(folder / "policy")
    (folder / "policy" / "model.safetensors").unlink()
    index = {"weight_map": {"a": f"../{NASTY}.safetensors"}}
    (folder / "policy" / "model.safetensors.index.json").write_text(json.dumps(index))
    load_policy(folder / "policy")


def configure(**entries: object) -> Callable[[Path], object]:
    def fail(folder: Path) -> None:
        write_model(folder / "policy")
        file = folder / "policy" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | entries))
        load_config(folder / "policy")

    return fail


def name_a_class(folder: Path) -> None:
    write_model(folder / "policy")
    file = folder / "policy" / "config.json"
    architectures = [f"{NASTY}ForSequenceClassification"]
    entries = json.loads(file.read_text()) | {"architectures": architectures}
    file.write_text(json.dumps(entries))
    load_policy(folder / "policy")


def write_rows(content: str, name: str = "rows.jsonl") -> Callable[[Path], object]:
    def fail(folder: Path) -> None:
        (folder / name).write_text(content)
        read_rows(str(folder / name), "prompts")

    return fail


def name_a_folder(folder: Path) -> None:
    path = folder / IN_NAMES.replace("\ud83d", "")
    path.mkdir()
    load_tokenizer(path)


def ask_a_judge(folder: Path) -> None:
    reply = CONTROLS["title"] + CONTROLS["up"] + CONTROLS["override"]
    with fault_server(refuse(400, {}, json.dumps({"error": {"message": reply}}))) as server:
        config = JudgingConfig(base_url=server.url, retries=0)
        model = OpenAIModel("m", config)
        model.complete([[{"role": "user", "content": "x"}]])


NAMES: dict[str, Callable[[Path], object]] = {
    "a tensor": name_a_tensor,
    "a shard": name_a_shard,
    "a type of model": configure(model_type=NASTY),
    "a kernel": configure(attn_implementation=f"evil/{NASTY}"),
    "a quantization": configure(quantization_config={"quant_method": NASTY}),
    "a class": name_a_class,
    "a column": write_rows(json.dumps({NASTY: "a"})),
    "a column of CSV": write_rows("x\x1b]0;t\x07,y\na,b\n", "rows.csv"),
    "a broken line": write_rows('{"prompt": "' + CONTROLS["up"] + '"'),
    "a file": write_rows("{", IN_NAMES.replace("\ud83d", "") + ".jsonl"),
    "a suffix": write_rows("{", "rows." + IN_NAMES.replace("\ud83d", "")),
    "a missing file": lambda folder: read_rows(f"{folder}/{NASTY}", "prompts"),
    "a folder": name_a_folder,
    "a hub id": lambda folder: load_tokenizer(f"org/{NASTY}"),
    "a registered model": lambda folder: check_model_name(f"{NASTY}/x"),
    "a setting": lambda folder: make_settings({NASTY: 1}, {}),
    "a value of a setting": lambda folder: make_settings({"sharding": NASTY}, {}),
}


@pytest.mark.parametrize("case", NAMES)
def test_a_name_with_control_characters_is_escaped(case: str, tmp_path: Path):
    with pytest.raises(PPOError) as refused:
        NAMES[case](tmp_path)
    assert not BAD.search(str(refused.value))


def test_columns_that_are_read_are_escaped(tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    column = NASTY.replace("\ud83d", "")
    file.write_text(json.dumps({column: "w1"}))
    rows = read_rows(str(file), "prompts", options=ReadOptions({"prompt": column}))
    assert rows.column("prompt") == ["w1"]
    described = describe_reading(rows)
    assert "prompt from x" in described
    assert not BAD.search(described)


def test_holders_of_leases_are_escaped(tmp_path: Path):
    holder = Holder(owner=NASTY, run=NASTY, taken=NASTY, renewed=NASTY)
    lease = Lease(folder=tmp_path, token=1, host=NASTY, pid=1, started=NASTY)
    assert not BAD.search(str(holder) + str(lease))


def test_an_exception_that_metaflow_stores_is_escaped():
    try:
        raise RuntimeError(NASTY)
    except RuntimeError as error:
        stored = redacted_exception(error)
    assert not BAD.search(stored.exception + stored.stacktrace)


# --- Output of a process ------------------------------------------------------------

PROGRAM = """
import json, logging, sys, warnings
from ppo_core.errors.redacted_output import install_redaction
install_redaction()
text = json.loads(sys.argv[1])
logging.basicConfig()
print("print", text, "end")
print(f"file {text} end", file=sys.stderr)
sys.stdout.write(f"write {text} end\\n")
sys.stdout.writelines([f"lines {text} end\\n"])
if "\\ud83d" not in text:
    sys.stdout.buffer.write(f"bytes {text} end\\n".encode())
    sys.stdout.flush()
logging.getLogger("x").warning("log %s end", text)
warnings.warn(f"warning {text} end")
print("é 漢字 😀\\ttab")
from tqdm import tqdm
for _ in tqdm(range(3)):
    pass
raise RuntimeError(f"raise {text} end")
"""


def run(text: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(text)],
        cwd=ROOT,
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    # Without universal line ends, which would hide carriage returns.
    return (ran.stdout + ran.stderr).decode("utf-8", "surrogatepass")


def run_on_terminal(text: str) -> str:
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 80))  # progress bars need lines
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(text)],
        cwd=ROOT,
        stdout=child,
        stderr=child,
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    )
    os.close(child)
    output = b""
    while True:
        try:
            part = os.read(parent, 1 << 16)
        except OSError:  # the process ended
            break
        if not part:
            break
        output += part
    process.wait()
    os.close(parent)
    # The terminal itself adds carriage returns.
    return output.decode("utf-8", "surrogatepass").replace("\r\n", "\n")


def without_bars(output: str) -> str:
    """Leave out the lines of tqdm, which begin with a carriage return."""
    return "\n".join(line for line in output.split("\n") if "it/s" not in line)


def shown(output: str) -> list[str]:
    """The words before each text that is shown."""
    return sorted(set(re.findall(r"\b(print|file|write|lines|log|warning|raise)\b .*end", output)))


WORDS = sorted("print file write lines log warning raise".split())


def test_no_control_character_is_in_the_output_of_a_process():
    output = without_bars(run(NASTY))
    assert not BAD.search(output)
    assert shown(output) == WORDS
    assert "é 漢字 😀\ttab" in output


def test_bytes_are_escaped_too():
    output = without_bars(run("x" + CONTROLS["title"] + CONTROLS["title of C1"] + "é\u202e"))
    assert not BAD.search(output)
    assert re.search(r"bytes x\\x1b.*é\\u202e end", output)


def test_only_colors_reach_a_terminal():
    output = without_bars(run_on_terminal(NASTY))
    assert not BAD.search(re.sub(r"\x1b\[[0-9;]*m", "", output))
    assert shown(output) == WORDS


def test_colors_and_progress_bars_of_a_terminal_stay():
    colored = "\x1b[1;32mgreen\x1b[0m"
    output = run_on_terminal(colored)
    assert f"print {colored} end" in output
    assert re.search(r"\r.*3/3 .*it/s", output)
