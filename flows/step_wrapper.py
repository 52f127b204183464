"""Wrap every step of the flow RLHF: measure time, renew the lease, report errors, send alarms.

The lease is the right of one run at a time to train a registered model (see
`pipeline.storage.model_lease`).
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

from metaflow import current, user_step_decorator
from metaflow.exception import METAFLOW_EXIT_DISALLOW_RETRY

from flow_parts import RunStoppedError, alarms_of, run_id
from pipeline import stages
from pipeline.settings.environment import runs_remotely
from ppo_core.errors import PPOError, ProcessError, RunInterruptedError, StorageError
from ppo_core.io.atomic_files import explained_full_disk
from retraining import alarms, lease_of_run

RECORDS = 17
"""Format version of the records that steps pass to each other. Increase it when the code can no
longer read older records."""


@user_step_decorator
def phase(step_name: str, flow: Any, inputs: Any = None, attributes: Any = None) -> Iterator[None]:
    """Measure and watch a step, and print an error of the project without a traceback.

    Without a scheduler, a step with `@retry` is not retried after a permanent error (see
    `is_permanent`). A scheduler retries the step after every error. Each attempt then prints the
    error, and the last attempt releases the lease.
    """
    # A join step has no artifacts before it merges the artifacts of its inputs.
    earlier = flow if inputs is None else next(iter(inputs))
    if step_name != "start" and getattr(earlier, "records", None) != RECORDS:
        raise RunStoppedError(
            "The resumed run was started by another version of this flow, so this version cannot "
            "read its results. Start a new run; models that are already trained are reused."
        )
    started = time.perf_counter()
    settings, run = (getattr(earlier, name, None) for name in ("settings", "tracked"))
    if run:
        require_folder(run)
    this_step = getattr(flow, step_name)

    def ends_run(error: BaseException | None) -> bool:
        if error is None:
            return step_name == "end"
        return is_last_attempt(this_step, is_permanent=is_permanent(error))

    lease = lease_of_run.KeptLease(
        earlier.lease, lambda: getattr(flow, "settings", settings), run_id(), ends_run
    )

    def report_end(error: BaseException) -> None:
        """If an error ends the run, write it into the run's page, and check the budget."""
        if settings and run and ends_run(error) and is_first_machine():
            told = alarms_of(earlier)
            alarms.alarm_budget(told.topic, told.gpu_hours, settings, run)
            # Imported here, because a step that succeeds does not need it.
            from pipeline.reports.run_page.write_page import write_failure

            message = (str(error) or repr(error)).removeprefix(f"{step_name}: ")
            write_failure(run, settings, f"{step_name} failed: {message}")

    def on_hang(problem: str) -> None:
        error = ProcessError(f"{problem}.")
        lease.end_hung_step(error)
        report_end(error)

    watched = stages.tracked.watched(step_name, settings, run, on_hang)
    try:
        with explained_full_disk(), lease, watched:
            yield
    except Exception as error:
        report_end(error)
        if not isinstance(error, PPOError):
            raise
        message = str(error)
        if step_name != "start":
            message = with_next_move(error, of_retrain=bool(earlier.lease))
        if is_permanent(error) and most_attempts(this_step) > 1:
            print(f"{RunStoppedError.headline}:\n{message}", file=sys.stderr, flush=True)
            sys.exit(METAFLOW_EXIT_DISALLOW_RETRY)
        raise RunStoppedError(message) from error
    flow.seconds = {**getattr(flow, "seconds", {}), step_name: time.perf_counter() - started}


def require_folder(run: Any) -> None:
    """Raise if the folder of a run is not there, see `has_folder`.

    Raises:
        RunStoppedError: the folder is missing.
    """
    if not stages.tracked.has_folder(run):
        raise RunStoppedError(
            f"The run has no folder '{run.folder}', so its trainings would begin again, and its "
            "version could not be registered. Start `resume` in the folder in which the run was "
            "started. If the run's folder was deleted, start a new run; models that are already "
            "trained are reused."
        )


def with_next_move(error: PPOError, *, of_retrain: bool) -> str:
    """Append to an error's message the command that continues the run after a correction.

    A run that Retrain started (`of_retrain`) cannot be resumed, because a resumed run has another
    id, and the lease is of one run. Otherwise a message that already names a command, such as the
    message about a refused reward model, is returned unchanged.
    """
    if of_retrain and not runs_remotely():
        return (
            f"{error}\nRetrain started this run, so `resume` cannot continue it. After a "
            "correction, start `python flows/retrain.py` again. Models that are already trained "
            "are reused."
        )
    if "resume" in str(error) or "python flows/rlhf.py" in str(error):
        return str(error)
    if runs_remotely():
        move = "After a correction, continue with `python flows/deploy.py DEPLOYMENT.toml --start`."
    else:
        move = (
            "If you corrected something other than the settings, continue with `python "
            "flows/rlhf.py resume`. After a change of the settings, start a new run."
        )
    return f"{error}\n{move} Models that are already trained are reused."


def is_permanent(error: BaseException) -> bool:
    """Return whether a second attempt would fail with the same error."""
    passes = ProcessError | RunInterruptedError | StorageError
    return isinstance(error, PPOError) and not isinstance(error, passes)


def is_last_attempt(step: Any, *, is_permanent: bool = True) -> bool:
    """Return whether the run ends if this attempt of a step fails.

    Without a scheduler, a permanent error ends the run at once. A scheduler retries every error.
    """
    is_retried = runs_remotely() or not is_permanent
    return not is_retried or current.retry_count + 1 >= most_attempts(step)


def is_first_machine() -> bool:
    """Return whether this process is on the first of the machines that share a step."""
    parallel = current.get("parallel")
    return parallel is None or parallel.node_index == 0


def most_attempts(step: Any) -> int:
    """Return the maximum number of attempts that Metaflow makes to run a step."""
    return 1 + sum(int(one.attributes["times"]) for one in step.decorators if one.name == "retry")
