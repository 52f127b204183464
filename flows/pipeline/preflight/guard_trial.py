"""Try each guard of a user on two rows before anything is trained."""

from pipeline.evaluation.guards.functions import load_guards, score_by_function
from pipeline.inputs.data_sets import RunData
from pipeline.inputs.preference_pairs import label_pairs
from pipeline.preflight.judge_trial import watched_trial
from pipeline.storage.workspace import original_names
from ppo_core.data.rows.dialogues import shown_prompt


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
    # A single row is used twice.
    rows = data.examples()
    prompts = [shown_prompt(row["prompt"]) for row in (rows[0], rows[min(1, len(rows) - 1)])]
    responses = [label_pairs(data.test_pairs())[0].chosen, ""]
    with watched_trial(data.settings):
        for name, loaded in load_guards(config).items():
            scores = score_by_function(name, loaded.function, prompts, responses)
            first, second = scores.tolist()
            source = original_names(config.functions[name])
            print(
                f"promotion.guards.functions.{name}={source}: {first:.4g} for a chosen answer, "
                f"{second:.4g} for an empty one",
                flush=True,
            )
