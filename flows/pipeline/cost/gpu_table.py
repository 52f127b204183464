"""GPUs by name: memory, speed and price, from flows/gpus.toml and the settings."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.launch.commands import FoundGpu, found_gpus
from pipeline.settings.hardware_config import HardwareConfig
from pipeline.settings.settings import Settings
from ppo_core.errors import ConfigError

TABLE = Path(__file__).parents[2] / "gpus.toml"

GB = 10**9
"""Bytes of a gigabyte, the unit of bandwidths in the table."""

USABLE = 0.9
"""Fraction of a GPU's memory that tensors may take. The rest is for CUDA's context and for unused
parts of allocated blocks."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A type of GPU. A number is None if neither the table nor the settings specify it."""

    name: str
    device: str = ""
    """Full device name that CUDA reports; empty if it is unknown."""

    memory: int
    """Bytes of memory."""

    bf16: float | None = None
    """Operations per second in bfloat16."""

    fp32: float | None = None
    """Operations per second in fp32."""

    bandwidth: float | None = None
    """Bandwidth of the GPU's memory, in bytes per second."""

    link: float | None = None
    """Bandwidth between GPUs of one machine, one way, in bytes per second."""

    network: float | None = None
    """Bandwidth between machines, one way, in bytes per second."""

    price: float | None = None
    """US dollars per GPU and hour."""

    @property
    def usable(self) -> int:
        """Bytes that the tensors of a training may take."""
        return int(USABLE * self.memory)


def read_gpus(config: HardwareConfig) -> dict[str, Gpu]:
    """Return all GPUs by name; numbers of the settings replace numbers of the table.

    Raises:
        ConfigError: a GPU of the settings is not in the table, and its memory is not specified.
    """
    facts = _facts(config)
    for name, known in facts.items():
        if "memory_gib" not in known:
            raise ConfigError(
                f"[hardware.gpus.{name}] is not a GPU of {TABLE.name}, so it needs memory_gib. "
                f"Known there: {', '.join(_shipped())}."
            )
    return {name: _gpu(name, known) for name, known in facts.items()}


def find_gpu(config: HardwareConfig) -> Gpu | None:
    """Return the GPU that the settings name; if they name none, the GPU of this machine.

    Return None if this machine has no GPU either.

    Raises:
        ConfigError: the settings name an unknown GPU; or see `read_gpus`.
    """
    gpus = read_gpus(config)
    if config.gpu:
        if config.gpu not in gpus:
            raise ConfigError(
                f"hardware.gpu={config.gpu!r} is unknown. Known are {', '.join(gpus)}; add others "
                "as [hardware.gpus.NAME] with memory_gib and price_per_hour."
            )
        return gpus[config.gpu]
    if not found_gpus():
        return None
    found = found_gpus()[0]
    return _of_the_table(found, gpus) or Gpu(name=found.name, memory=found.memory)


def processes_on_a_machine(settings: Settings) -> int:
    """Return the number of processes of a training on each machine.

    The setting `processes` is the number; 0 means one process per GPU, or one without a GPU.

    Raises:
        ConfigError: the settings name a GPU but not `processes`, and this machine has no GPU.
    """
    if settings.hardware.gpu and not (settings.processes or found_gpus()):
        raise ConfigError(
            f"hardware.gpu={settings.hardware.gpu!r} names the GPU, but the number of GPUs is "
            "unknown: this machine has none. Set processes to the number of GPUs of a machine."
        )
    return settings.processes or len(found_gpus()) or 1


def price_per_hour(found: FoundGpu, gpus: Mapping[str, Gpu], named: str) -> float | None:
    """Return the price of a GPU that a step has used; None if it is unknown.

    Args:
        found: the GPU that the step has used.
        gpus: all GPUs by name, see `read_gpus`.
        named: name of the GPU in the settings; its price is used if `gpus` lacks the found GPU.
    """
    gpu = _of_the_table(found, gpus) or gpus.get(named)
    return gpu.price if gpu else None


def _of_the_table(found: FoundGpu, gpus: Mapping[str, Gpu]) -> Gpu | None:
    """Return the GPU of the table that has the found GPU's full device name; None if none has.

    The beginning of a name is not enough: an L40 is not an L4, and a slice of a GPU (MIG) is not
    the whole GPU.
    """
    return next((gpu for gpu in gpus.values() if gpu.device == found.name), None)


def _shipped() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = tomllib.loads(TABLE.read_text(encoding="utf-8"))["gpus"]
    return table


def _facts(config: HardwareConfig) -> dict[str, dict[str, Any]]:
    shipped = _shipped()
    return {
        name: {**shipped.get(name, {}), **config.gpus.get(name, {})}
        for name in [*shipped, *(name for name in config.gpus if name not in shipped)]
    }


def _gpu(name: str, facts: Mapping[str, Any]) -> Gpu:
    def scaled(fact: str, unit: float) -> float | None:
        return unit * facts[fact] if fact in facts else None

    return Gpu(
        name=name,
        device=facts.get("device", ""),
        memory=int(2**30 * facts["memory_gib"]),
        bf16=scaled("bf16_tflops", 1e12),
        fp32=scaled("fp32_tflops", 1e12),
        bandwidth=scaled("gb_per_second", GB),
        link=scaled("link_gb_per_second", GB),
        network=scaled("network_gb_per_second", GB),
        price=facts.get("price_per_hour"),
    )
