"""The command `python -m ppo_core.training.speed JOB.json`, which torchrun may also start."""

import sys
from pathlib import Path

from ppo_core.distributed.choose_sharding import SHARD_WEIGHTS
from ppo_core.distributed.process import (
    is_main_process,
    large_imports,
    prepare_command,
    reported_errors,
)
from ppo_core.errors import PPOError
from ppo_core.models.kernels.cpu_memory import prepare_cpu_process
from ppo_core.reporting.metrics_file import MetricsFile
from ppo_core.training.speed.job import WORKS, read_speed_job, write_speed


def main(file: Path) -> int:
    """Measure, and write the result beside the job; return the exit code."""
    job = read_speed_job(file)
    try:
        with reported_errors():
            with large_imports():
                from ppo_core.training.speed.measure import measure

            if job.use_cpu:
                prepare_cpu_process(shards_weights=job.sharding in SHARD_WEIGHTS)
            lines = MetricsFile(file.parent)

            def note(done: int, works: int) -> None:
                if is_main_process():
                    lines.append(done, {WORKS: works})

            found = measure(job, note)
            if is_main_process():
                write_speed(found, file)
    except PPOError as error:
        print(f"ppo_core.training.speed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    prepare_command()
    sys.exit(main(Path(sys.argv[1])))
