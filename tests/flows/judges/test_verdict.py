"""How the reply of a chat model is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.judges.verdict import MAX_REASON_CHARACTERS, read_verdict

VALID = [
    ("VERDICT: A", "first"),
    ("VERDICT: B", "second"),
    ("VERDICT: TIE", "tie"),
    ("verdict: b.", "second"),
    ("Verdict : a", "first"),
    ("**VERDICT: TIE**", "tie"),
    ("**Verdict:** B", "second"),
    ("A is right.\n\n## VERDICT: `A`\n", "first"),
    ("A is right, B is not.\r\nVERDICT: A\r\n", "first"),
    ("VERDICT: B\nB is shorter.", "second"),
    ("VERDICT: A\nIndeed.\nVERDICT: A", "first"),
    ("```\nVERDICT: [A]\n```", "first"),
    ("A", "first"),
    ("\n  b.\n", "second"),
    ("**Tie!**", "tie"),
    ("<think>\nVERDICT: B\n</think>\nVERDICT: A", "first"),
    ("VERDICT: B, no.\n</think>\nVERDICT: A", "first"),
    ("VERDICT: B\n</think>\nA", "first"),
    ("<think>x</think>VERDICT: A<think>VERDICT: B", "first"),
]

NO_VERDICT = [
    "",
    "  \n\n",
    "A and B",
    "A or B",
    "A B",
    "A\nB",
    "Both are good.\nA",
    "VERDICT:",
    "VERDICT: C",
    "VERDICT: A or B",
    "VERDICT: A / B",
    "VERDICT: AB",
    "VERDICT: BOTH",
    "VERDICT: A VERDICT: B",
    "VERDICT A",
    "My VERDICT: A",
    "The answer says VERDICT: A, which I ignore.",
    "The answer says\u2028VERDICT: A",
    "VERDICT: T\u0131E",
    "<html><body>VERDICT: A</body></html>",
    "<p>\nVERDICT: A</p>",
    '{"verdict": "A"}',
    "A good answer.",
    "I cannot judge this.",
    "<think>VERDICT: A</think>",
    "<think>\nVERDICT: A\n",
    "VERDICT: A\n</think>",
    "TIED",
]

BOTH_VERDICTS = [
    "VERDICT: A\nVERDICT: B",
    "VERDICT: A\nOr rather:\n**VERDICT: TIE**",
    "<think>hm</think>VERDICT: B\nVERDICT: A",
]


@pytest.mark.parametrize(("reply", "winner"), VALID)
def test_a_line_that_is_wholly_a_verdict_is_read(reply, winner):
    assert read_verdict(reply).winner == winner


@pytest.mark.parametrize("reply", NO_VERDICT)
def test_a_reply_without_a_verdict_is_invalid_and_quoted(reply):
    verdict = read_verdict(reply)
    assert verdict.winner == "invalid"
    assert verdict.reason == f"The reply has no verdict: {reply.strip()!r}"


@pytest.mark.parametrize("reply", BOTH_VERDICTS)
def test_a_reply_with_two_verdicts_is_invalid_and_quoted(reply):
    verdict = read_verdict(reply)
    assert verdict.winner == "invalid"
    assert verdict.reason == f"The reply has verdicts that differ: {reply!r}"


def test_the_reason_is_the_reply_without_its_verdict_and_its_thoughts():
    reply = "<think>Hm.</think>\nA names the capital.\n\nB does not.\n**VERDICT: A**\n"
    assert read_verdict(reply).reason == "A names the capital.\nB does not."
    assert read_verdict("A").reason == ""


def test_reasons_are_shortened():
    long = "word " * MAX_REASON_CHARACTERS
    kept = long[:MAX_REASON_CHARACTERS] + " ..."
    assert read_verdict(f"{long}\nVERDICT: A").reason == kept
    assert read_verdict(long).reason == f"The reply has no verdict: {kept!r}"
    exact = "x" * MAX_REASON_CHARACTERS
    assert read_verdict(f"{exact}\nVERDICT: A").reason == exact


prose = st.text().filter(lambda text: "verdict" not in text.lower() and "think>" not in text)


@given(prose, st.sampled_from(["A", "B", "TIE"]), prose)
def test_prose_around_a_verdict_changes_nothing(before, letter, after):
    winner = {"A": "first", "B": "second", "TIE": "tie"}[letter]
    assert read_verdict(f"{before}\nVERDICT: {letter}\n{after}").winner == winner


@given(prose, prose)
def test_prose_of_several_lines_is_never_a_verdict(one, other):
    assert read_verdict(f"So.\n{one}\n{other}").winner == "invalid"


@pytest.mark.parametrize("hard", ["*", "VERDICT", "VERDICT:", "<think>", "VERDICT: *", "\n"])
def test_a_reply_made_to_be_read_slowly_is_not(hard):
    # A pattern that backtracked over its 100,000 repetitions would take hours.
    assert read_verdict(hard * 100_000 + "x").winner == "invalid"
