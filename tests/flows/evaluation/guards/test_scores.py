"""Scores of answers by the built-in guards and by functions of a user."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.evaluation.guards.scores import guards_of, has_text
from pipeline.settings.gate_configs import GuardsConfig
from ppo_core.errors import ConfigError, DataError
from ppo_core.training.answer_prompts import Answers

FUNCTIONS = """
import numpy, torch

def polite(prompts, responses):
    return ["please" in text for text in responses]

def by_prompt(prompts, responses):
    return numpy.array([len(prompt) / 10 for prompt in prompts])

def tensor(prompts, responses):
    return torch.full((len(responses),), 0.5)

def above(prompts, responses):
    return [1.01] * len(responses)

def below(prompts, responses):
    return [-0.01] * len(responses)

def nan(prompts, responses):
    return [float("nan")] * len(responses)

def few(prompts, responses):
    return [1.0]

def column(prompts, responses):
    return [[1.0]] * len(responses)

def ragged(prompts, responses):
    return [[1.0], [1.0, 2.0]]

def gradient(prompts, responses):
    return torch.full((len(responses),), 0.5, requires_grad=True)

def bfloat16(prompts, responses):
    return torch.full((len(responses),), 0.5, dtype=torch.bfloat16)

def words(prompts, responses):
    return ["1"] * len(responses)

def none(prompts, responses):
    return None

def generator(prompts, responses):
    yield from [1.0] * len(responses)

def raises(prompts, responses):
    raise SystemExit(0)

def one_argument(responses):
    return [1.0] * len(responses)

def three_arguments(prompts, responses, reference):
    return [1.0] * len(responses)
"""


def answers(texts: Sequence[str], stopped: Sequence[bool] | None = None) -> Answers:
    return Answers(texts=list(texts), kl=None, stopped=stopped if stopped is None else [*stopped])


def scores(name: str, texts: Sequence[str], *, prompt: object = "Say it.", **config: object):
    source, guard = guards_of(GuardsConfig(**config))[name]
    return source, guard([prompt] * len(texts), answers(texts)).tolist()


def by_function(tmp_path: Path, name: str):
    file = tmp_path / "guards.py"
    file.write_text(FUNCTIONS)
    config = {"functions": {"own": f"python:{file}:{name}"}}
    return scores("own", ["yes please", ""], **config)


def test_an_answer_stops_where_the_decoding_says_so():
    _, guard = guards_of(GuardsConfig())["stops"]
    assert guard(["a", "b"], answers(["", "x"], [True, False])).tolist() == [1, 0]
    assert guard(["a", "b"], answers(["", "x"])) is None


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\t", "\u200b", "\ufeff\u2060", "\u00a0\u3000", "\x00\x07", "\u202e", "\u00ad"],
)
def test_an_answer_of_invisible_characters_is_empty(text: str):
    assert not has_text(text)
    assert scores("has_text", [text, f"{text}."])[1] == [0, 1]


@pytest.mark.parametrize("text", ["a", "0", ".", "🙂", "\u4e2d", "$", "\ufffd"])
def test_an_answer_with_a_visible_character_has_text(text: str):
    assert has_text(text)


def test_a_refusal_counts_in_both_directions():
    texts = ["I'm sorry, but I can't help with that.", "Paris."]
    assert scores("answers", texts)[1] == [0, 1]
    assert scores("refuses", texts)[1] == [1, 0]


def test_reasoning_before_an_answer_is_no_part_of_it():
    empty, thought = "<think>\n\n</think>\n\n", "<think>I'm sorry, but I can't say.</think>Paris."
    assert scores("has_text", [empty, f"{empty}.", "<think>So", thought])[1] == [0, 1, 0, 1]
    long = f"<think>{'So. ' * 100}</think>I'm sorry, but I can't help with that."
    assert scores("answers", [thought, long])[1] == [1, 0]


def test_the_language_is_the_one_of_the_last_message_of_a_chat():
    texts = ["Das ist die Antwort auf deine Frage.", "This is the answer to that."]
    chat = [
        {"role": "system", "content": "You are the assistant of a company and answer to users."},
        {"role": "user", "content": "Was ist die Antwort auf die Frage, und ist sie nicht kurz?"},
    ]
    assert scores("language", texts, prompt=chat)[1] == [1, 0]
    assert scores("language", texts, prompt="What is the answer to this, and is it short?")[1] == [
        0,
        1,
    ]


def test_a_whole_answer_matches_the_format_without_the_spaces_around_it():
    texts = ['{"a": 1}', ' {"a":\n 1} ', 'So: {"a": 1}', "", "{} {"]
    assert scores("format", texts, format=r"(?s)\{.*\}")[1] == [1, 1, 0, 0, 0]
    assert "format" not in guards_of(GuardsConfig())


def test_a_guard_that_is_off_is_not_there():
    assert list(guards_of(GuardsConfig(off=["language", "stops"]))) == [
        "has_text",
        "answers",
        "refuses",
    ]


def test_a_function_gets_prompts_and_responses(tmp_path: Path):
    source, given = by_function(tmp_path, "polite")
    assert given == [1, 0]
    assert source.startswith(f"python:{tmp_path / 'guards.py'}:polite, version ")
    assert by_function(tmp_path, "by_prompt")[1] == [0.7, 0.7]
    assert by_function(tmp_path, "tensor")[1] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("above", r"returned 1\.01, but the score of a response must be in \[0, 1\]"),
        ("below", r"returned -0\.01, but"),
        ("nan", "returned nan, but"),
        ("few", r"returned \[1\.0\] for 2 responses. Return a list with one number"),
        ("column", "Return a list with one number"),
        ("ragged", "Return a list with one number"),
        ("gradient", r"returned tensor\(\[0\.5.*Return a list with one number"),
        ("bfloat16", r"returned tensor\(\[0\.5.*Return a list with one number"),
        ("words", "Return a list with one number"),
        ("none", "returned None for 2 responses"),
        ("generator", "returned <generator"),
        ("raises", "The guard own raised SystemExit"),
    ],
)
def test_a_function_that_gives_no_scores_is_refused(tmp_path: Path, name: str, message: str):
    with pytest.raises(DataError, match=message):
        by_function(tmp_path, name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_argument", r"two lists.*too many positional.*Write it as own\(prompts, responses\)"),
        ("three_arguments", "missing a required argument: 'reference'"),
        ("absent", "has no function 'absent'. Write one that takes prompts and responses, and"),
    ],
)
def test_a_function_that_cannot_be_called_is_named(tmp_path: Path, name: str, message: str):
    with pytest.raises(ConfigError, match=rf"promotion\.guards\.functions\.own=.*{message}"):
        by_function(tmp_path, name)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"off": ["langage"]}, "off names 'langage', .* Did you mean language?"),
        ({"off": ["format"]}, "off names 'format'"),
        ({"off": ["polite"]}, "off names 'polite'"),
        ({"margins": {"polite": 0.1}}, "margins names 'polite', which is not a guard of this run"),
        ({"margins": {"format": 0.1}}, "margins names 'format'"),
        ({"off": ["stops"], "margins": {"stops": 0.1}}, "margins names 'stops'"),
        ({"margins": {"stops": 0.0}}, r"margins\.stops=0\.0 must be above 0"),
        ({"margins": {"stops": 1.1}}, r"margins\.stops=1\.1 must be above 0"),
        ({"margins": {"stops": float("nan")}}, r"margins\.stops=nan must be above 0"),
        ({"margin": 0.0}, r"margin=0\.0 must be above 0"),
        ({"margin": float("nan")}, "margin=nan must be"),
        ({"format": "("}, r"format='\(' is not a regular expression: missing \)"),
        ({"format": "a" * 5 + "{1,99999999999}"}, "is not a regular expression"),
        ({"functions": {"stops": "python:a.py:f"}}, r"functions\.stops is not a name of a guard"),
        ({"functions": {"": "python:a.py:f"}}, r"functions\. is not a name"),
        ({"functions": {"a b": "python:a.py:f"}}, r"functions\.a b is not a name"),
        ({"functions": {"a/b": "python:a.py:f"}}, r"functions\.a/b is not a name"),
        ({"functions": {"é": "python:a.py:f"}}, r"functions\.é is not a name"),
        ({"functions": {"a": "a.py:f"}}, r"functions\.a='a\.py:f' must be python:"),
        ({"functions": {"a": "python:f"}}, r"functions\.a='python:f' must be python:"),
        ({"functions": {"a": "reward-model:x"}}, "must be python:FILE_OR_MODULE:FUNCTION"),
    ],
)
def test_a_setting_that_would_be_ignored_or_fail_is_refused(config: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        GuardsConfig(**config)


def test_a_margin_is_the_own_one_of_a_guard_or_the_common_one():
    config = GuardsConfig(margin=0.1, margins={"own": 0.02}, functions={"own": "python:a.py:f"})
    assert config.margin_of("own") == 0.02
    assert config.margin_of("stops") == 0.1
    assert config.names == ["stops", "has_text", "answers", "refuses", "language", "own"]
