"""Try each guard of a user on two rows or documents before anything is trained."""

from pipeline.evaluation.guards.functions import load_guards, score_by_function
from pipeline.evaluation.guards.tasks import load_tasks, score_by_task
from pipeline.inputs.labeled_pairs import example_pair
from pipeline.inputs.run_data import RunData
from pipeline.preflight.judge_trial import watched_trial
from pipeline.settings.gate_configs import is_task_file
from pipeline.settings.settings import Settings
from pipeline.storage.workspace import original_names, workspace_of
from ppo_core.data.rows.dialogues import shown_prompt
from ppo_core.errors import ConfigError

TRIED_DOCUMENTS = 2
"""Number of documents of each task that are tried."""


def try_guards(data: RunData) -> None:
    """Call each function that the settings name as a guard, and print its scores of two responses.

    The second response is empty, because the policy may give empty responses. A function that hangs
    ends the step.

    Raises:
        ConfigError: a function does not exist, cannot be imported, or takes other arguments.
        DataError: a function raises an error, or does not return scores.
    """
    config = data.settings.promotion.guards
    if not config.functions:
        return
    # If there is only one row, it is used twice.
    rows = data.examples()
    prompts = [shown_prompt(row["prompt"]) for row in (rows[0], rows[min(1, len(rows) - 1)])]
    responses = [example_pair(data.test_pairs()).chosen, ""]
    with watched_trial(data.settings):
        for name, loaded in load_guards(config).items():
            scores = score_by_function(name, loaded.function, prompts, responses)
            first, second = scores.tolist()
            source = original_names(config.functions[name])
            print(
                f"promotion.guards.functions.{name}={source}: {first:.4g} for an answer to another "
                f"prompt, {second:.4g} for an empty one",
                flush=True,
            )


def try_tasks(settings: Settings) -> None:
    """Score random answers to some documents of each task that the settings name.

    Raises:
        ConfigError: see `load_tasks`; or a task is a file, and the steps share no disk.
        DataError: a task cannot be run, or its scores are not numbers in [0, 1].
    """
    config = settings.promotion.guards
    if not config.tasks:
        return
    files = [task for task in config.tasks if is_task_file(task)]
    if files and workspace_of(settings).store:
        raise ConfigError(
            f"promotion.guards.tasks.{files[0]} is a file, and the steps of this run share no "
            "disk, so the evaluation would lack the file and its data. Use a task of lm_eval, or "
            "write the guard as a function."
        )
    with watched_trial(settings):
        for name, task in load_tasks(config).items():
            score_by_task(name, task, _at_random, size=1, limit=TRIED_DOCUMENTS, seed=settings.seed)
            print(f"promotion.guards.tasks: {name} can be scored", flush=True)


def _at_random(size: int) -> str:
    """Return the name of lm_eval's model that answers at random."""
    return "dummy"
