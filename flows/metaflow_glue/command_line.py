"""Add hints and checks to the command line that Metaflow creates for `flows/rlhf.py`."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from metaflow._vendor.click import Context, Option
from metaflow._vendor.click.exceptions import NoSuchOption, UsageError
from metaflow.plugins.datastores.local_storage import LocalStorage
from metaflow.runtime import NativeRuntime
from metaflow.util import get_latest_run_id

from pipeline.settings.unknown_names import FILE_FORM, describe_unknown_option
from ppo_core.errors import ConfigError
from ppo_core.io.atomic_files import write_atomically
from ppo_core.io.text_files import read_text_file


def check_settings_file(argv: Sequence[str]) -> None:
    """Check that `--config` has the form that Metaflow expects, and that the file can be read.

    Without this check, Metaflow would accept any two words after `--config` as the name and the
    file. Metaflow would wait for ever if the file is a pipe to which nobody writes, and print a
    traceback if the file is not UTF-8.

    Raises:
        ConfigError: `--config` has another form, a settings file follows `run` directly, or the
            file cannot be read.
    """
    for word, following in pairwise(argv):
        if word == "run" and following.endswith(".toml"):
            raise ConfigError(
                f"{following!r:.200} after `run` is not an option. The settings file is named "
                f"before `run`: {FILE_FORM}"
            )
    for place, word in enumerate(argv):
        option, _, value = word.partition("=")
        if option != "--config" or "run" in argv[:place]:
            continue
        name, *rest = [*([value] if value else []), *argv[place + 1 :], ""]
        if name not in ("settings", "deployment") or rest[0] in ("", "run"):
            raise ConfigError(
                f"{' '.join([word, *argv[place + 1 : place + 2]])!r:.200} names no settings file. "
                f"Write: {FILE_FORM}"
            )
        read_text_file(Path(rest[0]), ConfigError)


def refuse_scheduler(argv: Sequence[str], num_nodes: int) -> None:
    """Raise if the flow is compiled for a scheduler that cannot run it.

    Raises:
        ConfigError: the scheduler is Airflow, or Step Functions with several machines.
    """
    # A value after `run` may be equal to the name of a scheduler.
    words = argv[: argv.index("run")] if "run" in argv else argv
    if "airflow" in words:
        raise ConfigError(
            "airflow is not supported: the DAG that Metaflow writes has no settings file, and "
            "Airflow 3 cannot import it. Deploy with argo-workflows or step-functions instead."
        )
    if "step-functions" in words and num_nodes > 1:
        raise ConfigError(
            f"num_nodes={num_nodes} is not possible with step-functions, which cannot start "
            "several machines for one step. Deploy with argo-workflows. Or use one larger machine: "
            "remove num_nodes, and set processes to the number of its GPUs."
        )


def prepare_resume(argv: Sequence[str], flow_name: str) -> None:
    """Make `resume` record its run as the latest; if no run is named, print which run is resumed.

    Raises:
        ConfigError: no run is named, and the working directory has none.
    """
    options = {word.partition("=")[0] for word in argv}
    if "resume" not in argv or options & {"run", "--help"}:
        return
    _record_resumed_runs(flow_name)
    if "--origin-run-id" in options:
        return
    latest = get_latest_run_id(lambda *_, **__: None, flow_name)
    if latest is None:
        raise ConfigError(
            f"{str(Path.cwd())!r} has no run to resume. Start `resume` in the folder in which the "
            "run was started, or give the run: resume --origin-run-id ID."
        )
    print(f"Resuming run {latest}. For another run: resume --origin-run-id ID.", flush=True)


def _record_resumed_runs(flow_name: str) -> None:
    """Before the first step of a resumed run, record this run as the latest run.

    Metaflow calls `execute` after it has copied the finished steps of the original run. Metaflow
    itself records the latest run only in the command `run`, so a second `resume` would continue the
    original run and repeat all steps that the first `resume` had finished. Metaflow has no hook for
    this, so this function replaces a method of Metaflow's runtime.
    """
    execute = NativeRuntime.execute

    def recorded(runtime: Any) -> Any:
        root = LocalStorage.get_datastore_root_from_config(lambda *_, **__: None)
        folder = Path(root, flow_name)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "latest_run", str(runtime.run_id))
        return execute(runtime)

    NativeRuntime.execute = recorded


def explain_unknown_options(options: Collection[str]) -> None:
    """Extend Metaflow's message about an unknown option with a hint: what to write instead.

    Metaflow has no setting for its messages, so this function replaces a method of its parser.

    Args:
        options: names of the flow's parameters, which are options of `run`.
    """
    describe = NoSuchOption.format_message

    def explained(error: NoSuchOption) -> str:
        # Imported here, because only this message needs the names of the settings.
        from pipeline.settings.make_settings import SETTING_NAMES

        if error.possibilities:
            return describe(error)
        params = error.ctx.command.params if error.ctx else []
        metaflow = {option.lstrip("-") for param in params for option in param.opts}
        hint = describe_unknown_option(error.option_name, {*options, *metaflow}, SETTING_NAMES)
        return f"{describe(error)}. {hint}"

    NoSuchOption.format_message = explained


def check_instead_of_run(context: Context, _option: Option, is_given: bool) -> bool:
    """If `--check` is given, make Metaflow's `run` call the flow's `check_only` and start no run.

    This is the callback of `--check`. Metaflow creates a run before the first step, and a step
    cannot end a run early. Therefore, this callback replaces the function of the command `run`
    after Metaflow has read the parameters.
    """
    if is_given and context.info_name == "run":

        def check(**parameters: Any) -> None:
            state = context.obj
            state.flow._set_constants(state.graph, parameters, state.config_options)
            state.flow.check_only()

        context.command.callback = check
    return is_given


def send_to_scheduler(context: Context, option: Option, given: Sequence[str]) -> Sequence[str]:
    """Make Metaflow's `trigger` send the values of `--set` as one text, joined by spaces.

    The scheduled run splits this text at its spaces. This is the callback of `--set`. Metaflow has
    no hook for this, so this callback replaces the function of the command `trigger` after Metaflow
    has read the values from the command line and the environment.
    """
    if context.info_name == "trigger":
        trigger = context.command.callback

        def send(**values: Any) -> Any:
            # If the value were a list, the run would receive the list as one JSON text.
            values[option.name] = " ".join(given) or None
            try:
                refuse_spaces(given)
            except ConfigError as error:
                raise UsageError(str(error)) from error
            return trigger(**values)

        context.command.callback = send
    return given


def refuse_spaces(overrides: Sequence[str]) -> None:
    """Raise if a value of `--set` contains a space, because a scheduled run splits at spaces.

    Raises:
        ConfigError: a value contains a space.
    """
    for text in overrides:
        if text.split() != [text]:
            raise ConfigError(
                f"--set {text!r:.200} has a space, at which a scheduled run would split it. Write "
                "the setting in the settings file, and create the deployment again."
            )
