"""Measurements as tables of rich."""

import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table

from tests.benchmarks.compare import Comparison, Pairing
from tests.benchmarks.estimators import Estimators
from tests.benchmarks.floor import BF16
from tests.benchmarks.growth import Growth, Padding, VocabularyMemory, exponent
from tests.benchmarks.tasks import Run
from tests.benchmarks.trainings import Trainings

MIB = 2**20


def make_table(title: str, columns: str) -> Table:
    """Return an empty table; columns are separated by |, and all but the first hold numbers."""
    table = Table(title=title, title_justify="left", min_width=len(title))
    for number, name in enumerate(columns.split("|")):
        table.add_column(name, justify="right" if number else "left", no_wrap=number > 0)
    return table


def phases(run: Run) -> str:
    """Return median seconds of sampling, scoring and updating."""
    names = ("sampling", "scoring", "updating")
    medians = (statistics.median(getattr(u, name) for u in run.updates) for name in names)
    return " / ".join(f"{seconds:.2f}" for seconds in medians)


def spread(values: Sequence[float]) -> str:
    """Return median, minimum and maximum."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def comparison_table(comparison: Comparison, rates: Mapping[str, float]) -> Table:
    """Return a row for each side of each pairing; rates are FLOP/s of matmuls by precision."""
    case = comparison.case
    title = f"{case.name}: {case.workload.batch} episodes an update ({comparison.seconds:.0f} s)"
    table = make_table(
        title,
        "setting|side|updates|episodes/s|sampling / scoring / updating, s|tokens"
        "|peak, MiB|floor reached|ratio (min-max)|memory ratio",
    )
    for pairing in comparison.pairings:
        for side in (pairing.ours, pairing.theirs):
            _add_side(table, pairing, side, comparison.episode_flops(side), rates)
    return table


def _add_side(
    table: Table, pairing: Pairing, run: Run, flops: float, rates: Mapping[str, float]
) -> None:
    ours = run is pairing.ours
    speeds = [run.episodes_per_second(n) for n in range(len(run.updates))]
    in_bf16 = run.updates[0].in_bf16
    rate = rates[BF16] if in_bf16 else max(rate for name, rate in rates.items() if name != BF16)
    table.add_row(
        pairing.title if ours else "",
        "ours" if ours else "TRL",
        str(len(run.updates)),
        spread(speeds),
        phases(run),
        f"{run.mean_tokens:.1f}",
        f"{run.peak_bytes / MIB:.0f}",
        f"{statistics.median(speeds) * flops / rate:.0%}",
        spread(pairing.ratios()) if ours else "",
        f"{pairing.memory_ratio:.2f}" if ours else "",
    )


def rates_table(rates: Mapping[str, float]) -> Table:
    """Return the table of the machine's matmul rates."""
    table = make_table("Matrix products", "precision|GFLOP/s")
    for name, rate in rates.items():
        table.add_row(name, f"{rate / 1e9:.0f}")
    return table


def sampling_table(seconds: Mapping[str, Mapping[str, Sequence[float]]], tokens: int) -> Table:
    """Return milliseconds per decoding step of the full batch, by model."""
    table = make_table(
        f"Sampling {tokens} tokens each at batch 32, milliseconds a step",
        "model|ours|generate|ratio (min-max)",
    )
    for model, ways in seconds.items():
        ours, theirs = ways["ours"], ways["generate"]
        table.add_row(
            model,
            f"{statistics.median(ours) / tokens * 1e3:.2f}",
            f"{statistics.median(theirs) / tokens * 1e3:.2f}",
            spread([b / a for a, b in zip(ours, theirs, strict=True)]),
        )
    return table


def growth_table(growths: Sequence[Growth]) -> Table:
    """Return cost at each size, and the exponents."""
    table = make_table(
        "Growth of ours: cost = c size^k",
        "what grows|sizes|ms an episode|k of time|MiB above imports|k of memory",
    )
    for growth in growths:
        table.add_row(
            growth.what,
            ", ".join(f"{size:g}" for size in growth.sizes),
            ", ".join(f"{1e3 * seconds:.1f}" for seconds in growth.seconds),
            f"{exponent(growth.sizes, growth.seconds):.2f}",
            ", ".join(f"{held / MIB:.0f}" for held in growth.bytes),
            f"{exponent(growth.sizes, growth.bytes):.2f}",
        )
    return table


def padding_table(padding: Padding) -> Table:
    """Return the cost of unequal sequence lengths."""
    table = make_table(
        "Padding: 32 rows of 20 tokens and one of 400, against 33 rows of mean length",
        "rows|sampling / scoring / updating, s|scoring + updating, ratio|all, ratio",
    )
    both = f"{padding.ratio('scoring', 'updating'):.2f}"
    table.add_row("unequal", phases(padding.unequal), both, f"{padding.ratio('seconds'):.2f}")
    table.add_row("equal", phases(padding.equal), "", "")
    return table


def memory_table(memory: VocabularyMemory) -> Table:
    """Return memory by vocabulary, with and without model states."""
    table = make_table(
        "Memory of neox-10m, MiB above the imports",
        "vocabulary|peak|weights, gradients, optimizer|the rest|rest, ratio",
    )
    above = memory.above()
    for number, vocabulary in enumerate(memory.vocabularies):
        table.add_row(
            str(vocabulary),
            f"{memory.peak_bytes[number] / MIB:.0f}",
            f"{memory.state_bytes[number] / MIB:.0f}",
            f"{above[number] / MIB:.0f}",
            f"{above[number] / above[0]:.2f}",
        )
    return table


def estimators_table(measured: Estimators) -> Table:
    """Return the cost of a step with a critic and without."""
    table = make_table(
        "neox-10m with a critic and without: ratios of updates in turns",
        "estimator|sampling / scoring / updating, s|peak, MiB|above imports, MiB|time|memory",
    )
    ratios = f"{measured.seconds_ratio():.2f}", f"{measured.bytes_ratio():.2f}"
    for run, own in ((measured.with_critic, ("", "")), (measured.without, ratios)):
        peak, above = run.peak_bytes / MIB, run.bytes_above_imports / MIB
        table.add_row(run.task.estimator, phases(run), f"{peak:.0f}", f"{above:.0f}", *own)
    return table


def trainings_table(kind: str, found: Sequence[Trainings]) -> Table:
    """Return speed and memory of SFT (`sft`) or of reward-model training (`reward`)."""
    unit = "examples" if kind == "sft" else "pairs"
    table = make_table(
        f"{kind}: one epoch, ours and TRL in turns",
        f"model|setting|{unit}|side|{unit}/s|peak, MiB|ratio (min-max)|memory ratio",
    )
    for one in found:
        about = (one.shape.name, one.setting, str(one.rows))
        for side, what, ratios in (
            (one.ours, about, (spread(one.ratios), f"{one.memory_ratio:.2f}")),
            (one.theirs, ("", "", ""), ("", "")),
        ):
            speeds = spread([one.rows / seconds for seconds in side.seconds])
            table.add_row(*what, side.side, speeds, f"{side.peak_bytes / MIB:.0f}", *ratios)
    return table
