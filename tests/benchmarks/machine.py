"""The machine of a measurement."""

import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil


def machine_lines() -> list[str]:
    """Return lines about processor, memory, versions, load (over two seconds) and date."""
    load = ", ".join(f"{each:.2f}" for each in psutil.getloadavg())
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "numpy"))
    return [
        f"Processor: {processor()}, {psutil.cpu_count()} cores; "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB; {platform.system()}",
        f"Python {platform.python_version()}, {versions}",
        f"Load at the start (1, 5, 15 minutes): {load}; other programs kept the "
        f"processors {psutil.cpu_percent(interval=2):.0f} % busy (above a few percent, threads "
        "wait for each other, and figures can be several times too large)",
        f"Date: {datetime.now(UTC):%Y-%m-%d}",
    ]


def processor() -> str:
    """Return the processor's name and its vector extensions."""
    facts = dict(
        line.split(":", 1)
        for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        if ":" in line
    )
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    has = set(facts.get("flags", "").split())
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in has]
    family = f"family {facts.get('cpu family')} model {facts.get('model')}"
    return f"{facts.get('model name', platform.machine())} ({family}; {', '.join(wide)})"
