"""Sample the load of the machine during a step, under MLflow's metric names `system/...`."""

import threading
from typing import Any

import psutil

from pipeline.tracking.run_log import RunLog

SECONDS = 10.0
"""Default interval; MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL overrides it."""

PREFIX = "system/"


class SystemMetrics:
    """Samples processor, memory, disk, network and GPUs until it is stopped.

    MLflow's own sampler calls the server after every sample and ends if there is no answer; this
    class uses the monitors of MLflow and logs through the journal.
    """

    def __init__(self, log: RunLog, *, patience: float = 0.0) -> None:
        """Log to `log` after `patience` seconds, starting after the existing steps."""
        self._log = log
        self._patience = patience
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)

    def start(self) -> None:
        """Start to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample if the patience is over, and end."""
        self._stopping.set()
        # A driver that hangs does not hang the step.
        self._thread.join(timeout=5)

    def _run(self) -> None:
        if self._patience and self._stopping.wait(self._patience):
            return
        # The load of the processor is the mean since the previous call in the same thread.
        psutil.cpu_percent()
        # A slow import, in this thread so that no step waits for it.
        from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL

        monitors = _monitors()
        step = self._log.journal.next_step(self._log.run, PREFIX)
        seconds = MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or SECONDS
        last = False
        while not last:
            last = self._stopping.wait(seconds)
            sample: dict[str, float] = {}
            for monitor in monitors:
                monitor.collect_metrics()
                sample |= {
                    PREFIX + key: value for key, value in monitor.aggregate_metrics().items()
                }
                monitor.clear_metrics()
            self._log.log_metrics(sample, step=step)
            step += 1


def _monitors() -> list[Any]:
    """Return MLflow's monitors for the hardware of this machine."""
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor
    from mlflow.system_metrics.metrics.rocm_monitor import ROCMMonitor

    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    for kind in (GPUMonitor, ROCMMonitor):
        try:
            return [*monitors, kind()]
        except (ImportError, RuntimeError):
            continue  # no such GPU, or not the package that asks it
    return monitors
