"""Chat templates that need more memory or time than a machine has."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ppo_core.data import chat_template
from ppo_core.data.chat_template import encode_with_mask, render_chat, set_prompt_format
from ppo_core.data.rows.overlong import fit_prompts
from ppo_core.data.rows.template_process import MAX_BYTES
from ppo_core.errors import DataError, TrainingError
from tests.helpers.inputs.rows import rows_of
from tests.helpers.models.chat import make_chat_tokenizer, say
from tests.helpers.paths import ROOT
from tests.helpers.slow_cases import slow

DOUBLED = "{% set n = namespace(x='xxxxxxxx') %}{% for i in range(40) %}DOUBLE{% endfor %}{{ n.x }}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"

BOMBS = {
    "a long text": "{{ 'x' * 10 ** 10 }}".replace("10 ** 10", "10000000000"),
    "a centred text": "{{ 'x'.center(5000000000) }}",
    "an indented text": "{{ 'x\ny' | indent(2000000000) }}",
    "nested loops": LOOPS.replace("BODY", ""),
    "nested loops of text": LOOPS.replace("BODY", "x" * 10_000),
    "a text on the left": "{{ 'x'.ljust(5000000000) }}",
    "a text on the right": "{{ 'x'.rjust(5000000000) }}",
    "zeros": "{{ '1'.zfill(5000000000) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(10000000) }}",
    "a filter that centres": "{{ 'x' | center(5000000000) }}",
    "a formatted number": "{{ '%9999999999d' % 1 }}",
    "a formatted text": "{{ '{:>5000000000}'.format('x') }}",
    "a list": "{{ ([0] * 5000000000) | length }}",
    "replacements": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "a join": "{{ ('y' * 100000).join(('x' * 100000) | list) }}",
    "a text that is doubled": DOUBLED.replace("DOUBLE", "{% set n.x = n.x ~ n.x %}"),
    "a sum that is doubled": DOUBLED.replace("DOUBLE", "{% set n.x = n.x + n.x %}"),
    "a number that is doubled": DOUBLED.replace("xxxxxxxx", "9")
    .replace("'9'", "9")
    .replace("DOUBLE", "{% set n.x = n.x * n.x %}"),
    "an indented JSON": "{{ messages | tojson(indent=1000000000) }}",
    "a dummy text": "{{ lipsum(n=10000000) }}",
    "a batch": "{{ [1] | batch(5000000000, 'x') | list | length }}",
    "a slice": "{{ [1] | slice(5000000000) | list | length }}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}xxxx{% endmacro %}"
    "{{ f(90) }}",
    "a captured text": "{% set x %}" + LOOPS.replace("BODY", "x" * 1000) + "{% endset %}{{ x }}",
    "a text that is only too long": "{{ 'x' * 100000000 }}",
    "only for long messages": "{% if messages[-1].content | length > 2 %}"
    "{{ 'x' * 10000000000 }}{% endif %}",
}


def peak_of_renderer() -> int:
    """Peak memory of the renderer in bytes; 0 if it was ended, as for too much time."""
    renderer = chat_template._PROCESS._process
    if renderer is None or renderer.poll() is not None:
        return 0
    status = Path(f"/proc/{renderer.pid}/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


QUICK, LATER = [*BOMBS][:5], [*BOMBS][5:]


@pytest.mark.parametrize("name", [*QUICK, *slow(*LATER)])
def test_a_template_is_refused_within_its_limits(name, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.5)
    tokenizer = make_chat_tokenizer(BOMBS[name])
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="chat template"):
        render_chat(tokenizer, say("w1 w2"), answer_follows=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - own < 100_000  # KiB
    assert peak_of_renderer() < 1.2 * MAX_BYTES


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 2**3 }}", "cannot be used: the operator [*][*] is not allowed"),
        ("{% if messages %}x", "cannot be used: .*end of template"),
        ("{{ 'x }}", "cannot be used: "),
        (BOMBS["a long text"], "needs too much memory .*: over 1 GiB. Set another"),
        ("{{ raise_exception('no system') }}", "rejects messages with the roles user: no system"),
    ],
)
def test_an_error_names_what_is_wrong_with_the_template(template: str, reason: str):
    with pytest.raises(DataError, match=reason):
        render_chat(make_chat_tokenizer(template), say("w1"), answer_follows=True)


@pytest.mark.parametrize("name", ["a long text", "a formatted text", "nested loops"])
def test_a_template_is_refused_when_the_tokenizer_is_loaded(name, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.5)
    with pytest.raises(DataError, match="chat template"):
        set_prompt_format(make_chat_tokenizer(BOMBS[name]), "auto")


def test_a_template_is_refused_in_every_thread(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.5)

    def outcome(name: str) -> str:
        tokenizer = make_chat_tokenizer(BOMBS[name] if name else "{{ messages[0].content }}")
        try:
            return render_chat(tokenizer, say("w1 w2"), answer_follows=True)
        except DataError:
            return "refused"

    names = ["", "a long text", "nested loops", "", "a list", ""]
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(outcome, names)) == ["refused" if name else "w1 w2" for name in names]


def test_a_process_that_was_ended_is_started_again():
    tokenizer = make_chat_tokenizer()
    text = render_chat(tokenizer, say("w1"), answer_follows=True)
    process = chat_template._PROCESS._process
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert render_chat(tokenizer, say("w1"), answer_follows=True) == text


def test_a_process_that_is_ended_while_it_renders_is_started_again_once():
    tokenizer = make_chat_tokenizer()
    text = render_chat(tokenizer, say("w1"), answer_follows=True)
    process = chat_template._PROCESS._process
    process.send_signal(signal.SIGSTOP)
    threading.Timer(0.2, process.kill).start()
    assert render_chat(tokenizer, say("w1"), answer_follows=True) == text

    def kill_two() -> None:
        for _ in range(2):
            while (process := chat_template._PROCESS._process) is None or process in killed:
                time.sleep(0.01)
            process.kill()
            killed.append(process)

    killed: list[subprocess.Popen[bytes]] = []
    threading.Thread(target=kill_two).start()
    # Not a DataError: the reader would leave the row out.
    with pytest.raises(TrainingError, match=r"ended twice, with the codes \[-9, -9\].*dmesg"):
        render_chat(make_chat_tokenizer(BOMBS["nested loops"]), say("w1"), answer_follows=True)


def test_a_process_that_cannot_be_started_is_no_full_disk(tmp_path: Path, monkeypatch):
    """As without memory, with ENOMEM; the cache of rows names every OSError as its own."""
    rows = rows_of("prompts", [{"prompt": say("a prompt of this test")}], is_chat=True)
    tokenizer = make_chat_tokenizer()
    chat_template._PROCESS._end()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(TrainingError, match=r"chat template .* could not be used .*No such file"):
        fit_prompts(rows, tokenizer, context=9, response_length=1, overlong="drop")


def test_only_the_time_in_which_the_template_computes_counts(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 1)
    render_chat(make_chat_tokenizer(), say("w1"), answer_follows=True)
    process = chat_template._PROCESS._process
    # Half a second of computing, in which the machine stops the process for a second and a half.
    for seconds, sent in ((0.1, signal.SIGSTOP), (1.6, signal.SIGCONT)):
        threading.Timer(seconds, process.send_signal, [sent]).start()
    works = LOOPS.replace("99999", "9000", 1).replace("99999", "1000").replace("BODY", "")
    assert render_chat(make_chat_tokenizer(works), say("w1"), answer_follows=True) == ""
    assert chat_template._PROCESS._process is process


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """Shells start programs in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_an_interrupt_does_not_mix_up_the_replies():
    tokenizer = make_chat_tokenizer("{{ messages[0].content }}")
    render_chat(tokenizer, say("w1"), answer_follows=True)
    looping = make_chat_tokenizer(BOMBS["nested loops"])
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        render_chat(looping, say("w2"), answer_follows=True)
    assert render_chat(tokenizer, say("w3"), answer_follows=True) == "w3"


def test_a_forked_process_renders_with_a_process_of_its_own():
    tokenizer = make_chat_tokenizer("{{ messages[0].content }}")
    render_chat(tokenizer, say("w1"), answer_follows=True)
    parent = chat_template._PROCESS._process
    child = os.fork()
    if not child:
        right = render_chat(tokenizer, say("w2"), answer_follows=True) == "w2"
        other = chat_template._PROCESS._process.pid != parent.pid
        chat_template._PROCESS._end()
        os._exit(0 if right and other else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert chat_template._PROCESS._process is parent
    assert render_chat(tokenizer, say("w3"), answer_follows=True) == "w3"


@pytest.mark.slow
def test_the_process_ends_with_its_parent(tmp_path: Path):
    code = (
        "import os, signal\n"
        "from ppo_core.data import chat_template\n"
        "from tests.helpers.models.chat import make_chat_tokenizer, say\n"
        "chat_template.render_chat(make_chat_tokenizer(), say('w1'), answer_follows=True)\n"
        "print(chat_template._PROCESS._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    stat = Path(f"/proc/{int(ran.stdout)}/stat")
    ended = threading.Event()
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        ended.wait(0.05)
    raise AssertionError("the process is still there")


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %} <eos> {% else %}<user> {{ m.content }} {% endif %}{% endfor %}"
)


def test_text_and_mask_are_those_of_transformers():
    tokenizer = make_chat_tokenizer(MARKED)
    turns = say("w1 w2", "w3 w4", "w5", "w6")
    theirs = tokenizer.apply_chat_template(
        turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = encode_with_mask(tokenizer, turns)
    assert (ids, mask) == (theirs["input_ids"], theirs["assistant_masks"])
    assert sum(mask) == 3
    own = make_chat_tokenizer("{{ eos_token }}{{ pad_token }}{{ messages | tojson }}")
    rich = [{"role": "user", "content": "é\ud800 w1", "none": None, "number": 7, "more": (1, 2)}]
    assert render_chat(own, rich, answer_follows=True) == own.apply_chat_template(
        rich, tokenize=False, add_generation_prompt=True
    )
