"""Find, download and check the champion with which a new policy is compared."""

from pathlib import Path

from pipeline.inputs.run_data import RunData
from pipeline.registry.aliases import CHAMPION, read_aliases
from pipeline.registry.fetch_policy import policy_folders
from pipeline.results.step_records import FetchedChampion
from pipeline.settings.settings import Settings
from ppo_core.data.encode_prompts import encode_prompt
from ppo_core.data.prompts import check_prompt_lengths, context_length
from ppo_core.data.rows.dialogues import in_format_of
from ppo_core.data.rows.row_error import RowError
from ppo_core.errors import DataError
from ppo_core.models.loading import load_config, load_tokenizer
from serving.champion import fetch_champion

CHAMPIONS = "champions"
"""Folder of downloaded versions, in the cache."""


def find_champion(settings: Settings) -> FetchedChampion | None:
    """Download and check the version with the alias `champion`; None if there is no champion yet.

    The registry is not changed, because the user of MLflow may be allowed only to read it.

    Raises:
        DataError: an evaluation prompt is too long for the champion.
        ModelError: the registry cannot be read, or the files differ from the registered files.
    """
    name = settings.registered_model
    version = read_aliases(name).get(CHAMPION)
    return None if version is None else fetch_version(settings, version)


def fetch_version(settings: Settings, version: int) -> FetchedChampion:
    """Download and check a version of the registered model.

    Raises:
        DataError: see `find_champion`.
        ModelError: see `find_champion`.
    """
    cache = Path(settings.output_dir) / "cache" / CHAMPIONS
    fetched = fetch_champion(settings.registered_model, version=version, cache=cache)
    model, tokenizer = policy_folders(fetched.folder)
    champion = FetchedChampion(version=version, model=str(model), tokenizer=str(tokenizer))
    _check_champion(settings, champion)
    return champion


def _check_champion(settings: Settings, champion: FetchedChampion) -> None:
    """Raise before training if the champion cannot answer the evaluation prompts."""
    tokenizer = load_tokenizer(champion.tokenizer)
    data = RunData(settings)
    rows = data.evaluation_rows()
    # With `rotate`, check all rows: if this version becomes champion during a run, it is judged on
    # the rows that were drawn for the previous champion.
    judged = list(rows) if settings.evaluation.rotate else data.examples()
    try:
        check_prompt_lengths(
            [encode_prompt(tokenizer, in_format_of(tokenizer, row["prompt"])) for row in judged],
            context=context_length(load_config(champion.model)),
            response_length=settings.ppo.response_length,
        )
    except (DataError, RowError) as error:
        raise DataError(
            f"{rows.source}: the evaluation prompts cannot be answered by the champion, version "
            f"{champion.version} of '{settings.registered_model}': {error}"
        ) from error
