"""Python functions as judges: the built-in rule, or a function in a user's file or module."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from numbers import Real
from typing import Any

from pipeline.demo import judge, posts
from pipeline.judges.verdict import WINNERS, JudgedPrompt, Verdict
from pipeline.storage.workspace import original_names
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.errors import DataError, user_code_errors
from ppo_core.io.folder_cache import digest_of_code
from ppo_core.io.progress_bar import BAR_DELAY, progress
from ppo_core.io.user_code import load_function, require_call

JudgeFunction = Callable[[list[str], list[tuple[str, str]]], Iterable[Any]]
"""Function that maps prompts and pairs of answers to one verdict per pair. A verdict is a word of
`WINNERS`, or a mapping or object with `winner` and optionally `probability` and `reason`."""


class FunctionJudge:
    """Calls a judging function, and checks the verdicts that it returns."""

    members: tuple[str, ...] = ()

    def __init__(self, name: str, function: JudgeFunction, version: str) -> None:
        """Take the function, its name in reports, and a digest of its source."""
        self.name = name
        self.version = version
        self._function = function
        self._described = f"The judge {name} ({_place_of(function)})"

    def __call__(
        self, prompts: Sequence[JudgedPrompt], pairs: Sequence[tuple[str, str]]
    ) -> list[Verdict]:
        """Return one verdict per pair.

        Raises:
            DataError: the function raised an error, or did not return one valid `Verdict` for
                every pair.
        """
        # A generator runs only while its verdicts are read, so they are read in this context.
        with user_code_errors(DataError, self._described):
            verdicts = self._verdicts(list(map(shown_prompt, prompts)), list(pairs))
        if len(verdicts) != len(pairs):
            number = f"more than {len(pairs)}" if len(verdicts) > len(pairs) else len(verdicts)
            raise DataError(
                f"{self._described} gave {number} verdicts for {len(pairs)} pairs. "
                "Return one verdict for each pair, in the order of the pairs."
            )
        return verdicts

    def _verdicts(self, prompts: list[str], pairs: list[tuple[str, str]]) -> list[Verdict]:
        """Call the function and read what it returns, up to one verdict more than expected."""
        verdicts = []
        with progress(len(pairs), "judging", "pair", delay=BAR_DELAY) as bar:
            given = self._function(prompts, pairs)
            if not isinstance(given, Iterable):
                raise DataError(
                    f"{self._described} returned {given!r:.80}. Return a list with one verdict "
                    "for every pair."
                )
            # One verdict too many is an error. Stop there, because a generator may never end.
            for number, item in enumerate(islice(given, len(pairs) + 1), start=1):
                verdicts.append(self._read(item, number))
                bar.update()
        return verdicts

    def _read(self, item: Any, number: int) -> Verdict:
        fields = _fields_of(item)
        winner = fields.get("winner")
        if not isinstance(winner, str) or winner not in WINNERS:
            raise DataError(
                f"{self._described} gave {item!r:.80} for pair {number}. Return one of "
                f"{', '.join(WINNERS)}, or an object whose `winner` is one of them."
            )
        probability = fields.get("probability")
        if not (probability is None or _is_probability(probability)):
            raise DataError(
                f"{self._described} gave the probability {probability!r:.80} for pair "
                f"{number}. Return the probability that the first answer is better, a number from "
                "0 to 1, or None."
            )
        return Verdict(
            winner=str(winner),
            probability=None if probability is None else float(probability),
            # A reason from JSON can contain a lone surrogate, which cannot be encoded as UTF-8.
            reason=str(fields.get("reason") or "").encode(errors="replace").decode(),
        )


def rule_judge() -> FunctionJudge:
    """Return the rule judge of the built-in demo task."""
    return FunctionJudge("rule", judge.judge, digest_of_code(judge.__name__, posts.__name__))


def load_function_judge(place: str) -> FunctionJudge:
    """Return the judge `FILE_OR_MODULE:FUNCTION`; a name that ends in `.py` is a file.

    Raises:
        ConfigError: the file, module or function does not exist, or cannot be imported.
    """
    loaded = load_function(place, "prompts and pairs")
    call = (
        f"the function in {_place_of(loaded.function)} is called with two lists, the prompts and "
        "the pairs of answers"
    )
    require_call(loaded.function, call, "judge(prompts, pairs)")
    return FunctionJudge(original_names(f"python:{place}"), loaded.function, loaded.version)


def _place_of(function: JudgeFunction) -> str:
    """Return the file and the line of a function."""
    plain = inspect.unwrap(function)
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else type(plain).__name__


def _fields_of(item: Any) -> Mapping[str, Any]:
    if isinstance(item, str):
        return {"winner": item}
    if isinstance(item, Mapping):
        return item
    return {name: getattr(item, name, None) for name in ("winner", "probability", "reason")}


def _is_probability(value: Any) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    # Compare before calling `float`, which raises for a very large integer.
    return is_number and bool(0 <= value <= 1)
