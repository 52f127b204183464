"""Sample the machine's load during a step, as MLflow's metrics `system/...`."""

import threading
from typing import Any

import psutil

from pipeline.tracking.journal import IMPORTING_MLFLOW
from pipeline.tracking.run_log import RunLog
from ppo_core.errors import PPOError

SECONDS = 10.0
"""Default sampling interval; MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL overrides the default."""

PREFIX = "system/"


class SystemMetrics:
    """Samples processor, memory, disk, network and GPUs from `start` until `stop`.

    MLflow's own sampler calls the server after every sample and ends if the server does not
    answer. This class uses MLflow's monitors, but logs through the journal.
    """

    def __init__(self, log: RunLog, *, patience: float = 0.0) -> None:
        """Log to `log` after `patience` seconds; the first step follows the last step in `log`."""
        self._log = log
        self._patience = patience
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)

    def start(self) -> None:
        """Start sampling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop; take a last sample if `patience` seconds have passed."""
        self._stopping.set()
        # With a timeout, because the step must not wait for a driver that hangs.
        self._thread.join(timeout=5)

    def _run(self) -> None:
        if self._patience and self._stopping.wait(self._patience):
            return
        # psutil returns the mean load since the previous call in the same thread.
        psutil.cpu_percent()
        # Imported in this thread, so that no step waits for this slow import.
        with IMPORTING_MLFLOW:
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
            try:
                self._log.log_metrics(sample, step=step)
            except PPOError as error:  # the disk of the journal is full
                print(
                    f"Warning: The load of the machine is not sampled any more. {error}", flush=True
                )
                return
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
            continue  # no such GPU, or the package for the GPU is missing
    return monitors
