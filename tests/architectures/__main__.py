"""`python -m tests.architectures`: measure every model type, and write the table; see --help."""

import argparse
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tests.architectures.measure import LIMIT, OUTCOMES, Result, measure
from tests.architectures.zoo import CAUSAL, MULTIMODAL

HEADER = """# Model types

Written by `make architectures`. Each model type of transformers {version} is built small with
random weights, and trained for two PPO updates in fp32. It is *exact* if the log-probabilities of
its responses differ by at most {limit:.0e} from the model's own forward pass of each sequence
alone, in sampling and in scoring, before and after the updates; where it is further, from that
pass in double precision, which has no rounding of its own. *Refused* is a model that the
trainer does not take, with its reason. *Not built* are types whose small configuration is not
known here, or that need a library that is not installed.

A small model cannot show everything: windows and sparse attention that begin after thousands of
tokens are not reached.
"""


def main(arguments: Sequence[str]) -> int:
    """Measure model types; return 1 if any is wrong or crashes."""
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("--types", nargs="*", help="model types; default: all")
    parser.add_argument("--results", type=Path, help="file for the table")
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    logging.getLogger("ppo_core").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    results = []
    for name in args.types or [*CAUSAL, *MULTIMODAL]:
        results.append(measure(name))
        print(_line(results[-1]), flush=True)
    counts = Counter(result.outcome for result in results)
    print(", ".join(f"{outcome} {counts[outcome]}" for outcome in OUTCOMES))
    if args.results:
        args.results.write_text(_table(results))
    return int(counts["wrong"] + counts["crash"] > 0)


def _line(result: Result) -> str:
    figure = "" if result.difference is None else f"{result.difference:.0e}"
    return (
        f"{result.outcome:10} {result.name:28} {figure:6} {' '.join(result.detail.split())[:120]}"
    )


def _table(results: Sequence[Result]) -> str:
    parts = [HEADER.format(version=transformers.__version__, limit=LIMIT)]
    groups = {"Causal language models": CAUSAL, "Models of text and images": MULTIMODAL}
    for title, names in groups.items():
        rows = [result for result in results if result.name in names]
        counts = Counter(result.outcome for result in rows)
        total = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
        parts.append(f"## {title}\n\n{len(rows)} types: {total}.\n")
        parts.append("| type | result | difference | backend, or reason |\n|---|---|---|---|")
        parts += [_row(result) for result in sorted(rows, key=_order)]
        parts.append("")
    return "\n".join(parts)


def _order(result: Result) -> tuple[int, str]:
    return OUTCOMES.index(result.outcome), result.name


def _row(result: Result) -> str:
    figure = "" if result.difference is None else f"{result.difference:.0e}"
    reason = " ".join(result.detail.split())[:300].replace("|", "/").replace("<", "&lt;")
    return f"| {result.name} | {result.outcome} | {figure} | {reason} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
