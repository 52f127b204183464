"""Ask the judges of a run about one pair before anything is trained."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from pipeline.inputs.labeled_pairs import LabeledPair, label_pairs
from pipeline.inputs.run_data import RunData
from pipeline.judges.judge_names import JudgePart, has_access_to_judge, read_judges
from pipeline.judges.make_judge import make_judge_of_run
from pipeline.judges.verdict import Judge, swapped
from pipeline.launch.stall_watch import watched_step
from pipeline.settings.settings import Settings
from ppo_core.config.placement import free_memory, placement_for_reading
from ppo_core.errors import JudgeError
from ppo_core.models.loading import count_parameters

MOST_PAIRS = 3
"""Number of pairs after which a judge that gave no verdict is refused."""

BESIDE_WEIGHTS = 0.25
"""Extra memory of a judging model, as a fraction of its weights."""


def try_judges(data: RunData, setting: str, spec: str) -> None:
    """Ask each judge of a setting about a held-out pair in both orders, and print its answer.

    A judge that gives no verdict is asked about the next pair, up to `MOST_PAIRS` pairs. Replies of
    servers are cached, so a later run with the same pairs does not pay again. Two kinds of judges
    are skipped: a model that is too large for this machine, and a server whose key only the judging
    step has.

    Raises:
        ConfigError: a judge cannot be called with prompts and pairs.
        DataError: a function raises an error, or returns no verdicts.
        JudgeError: a judge gives no verdict, or its server does not answer.
        ModelError: the model cannot judge.
    """
    settings = data.settings
    pairs = [pair for pair in label_pairs(data.test_pairs()) if not pair.tie]
    with watched_trial(settings):
        for part in read_judges(spec):
            reason = _why_not_here(part, settings)
            if reason:
                said = f"not asked yet, because {reason}"
            else:
                said = ask_judge(make_judge_of_run(settings, part.spec), pairs)
            print(f"{setting}={part.spec}: {said}", flush=True)


def watched_trial(settings: Settings) -> AbstractContextManager[None]:
    """Return a context that ends the first step if the user's code or a server hangs."""
    return watched_step(
        "start",
        Path(settings.output_dir),
        stall_minutes=settings.stall_minutes,
        step_minutes=settings.step_minutes,
    )


def ask_judge(judge: Judge, pairs: Sequence[LabeledPair]) -> str:
    """Ask a judge about pairs in both orders, until it gives a verdict; return the result as text.

    Raises:
        JudgeError: the judge gives no verdict on the first `MOST_PAIRS` pairs.
    """
    reason = ""
    for pair in pairs[:MOST_PAIRS]:
        answers = pair.chosen, pair.rejected
        first, second = judge([pair.prompt, pair.prompt], [answers, answers[::-1]])
        given = [one.winner for one in (first, swapped(second)) if one.winner != "invalid"]
        if given:
            return _in_words(given)
        reason = first.reason or second.reason
    raise JudgeError(
        f"The judge {judge.name} gave no verdict on {min(len(pairs), MOST_PAIRS)} held-out pairs "
        f"in either order{_as_clause(reason)}, so the win rate would be unknown. Choose a judge "
        "that can compare answers to your prompts."
    )


def _in_words(given: Sequence[str]) -> str:
    if len(given) == 1:
        return "gave a verdict on a held-out pair in only one of the two orders"
    if "tie" in given and given[0] != given[1]:
        return "preferred an answer in one order, and called a tie in the other order"
    if given[0] != given[1]:
        return "chose by position: its preference changed with the order of the answers"
    words = {"first": "the answer that people prefer", "second": "the other answer"}
    return f"preferred {words.get(given[0], 'neither answer')} in a held-out pair, in both orders"


def _as_clause(reason: str) -> str:
    return f" ({reason.rstrip('.'):.200})" if reason else ""


def _why_not_here(part: JudgePart, settings: Settings) -> str:
    """Return why a judge cannot be asked on this machine; empty if the judge can be asked."""
    if part.kind == "openai" and not has_access_to_judge():
        return "only the judging step has its key"
    return why_too_large(part, settings)


def why_too_large(part: JudgePart, settings: Settings) -> str:
    """Return why a model does not fit this machine; empty if it fits, or is no local model."""
    if part.kind not in ("reward-model", "transformers"):
        return ""
    scores = part.kind == "reward-model"
    placement = placement_for_reading("fp32" if scores else settings.precision)
    needed = placement.dtype.itemsize * count_parameters(part.source, scores=scores)
    needed = round(needed * (1 + BESIDE_WEIGHTS))
    if needed <= (free := free_memory(placement.device)):
        return ""
    return f"it needs {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free"
