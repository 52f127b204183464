"""`run --check`: the checks of the first step, and the sizes of the run, without a run."""

from pipeline.promotion.champion import look_up_champion
from pipeline.settings.settings import Settings
from pipeline.stages.run_size import sizes_in_words
from pipeline.stages.start import prepare_inputs


def check_run(given: Settings) -> str:
    """Check everything that the first step checks, and return the sizes of the run as text.

    Nothing is trained or registered, and no run is created. Files that a run would reuse stay in
    the cache: those of a built-in task, and the champion.

    Raises:
        ConfigError: a setting is invalid.
        DataError: a data set cannot be used.
        ModelError: a model cannot be used, or MLflow does not answer.
    """
    settings = prepare_inputs(given)
    champion = look_up_champion(settings)
    return sizes_in_words(settings, has_champion=champion is not None)
