"""Find the reward model and critic of the champion's run, and check that a run can start from them.

If there are no such models, the run starts without them and reports the reason. If the models do
not fit, the run is refused, because a person has changed the settings or the registry.
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.inputs.flow_run import CRITIC, REWARD_MODEL, ChampionStart
from pipeline.inputs.replayed_pairs import (
    REPLAYED,
    count_trained,
    read_start_rows,
    trained_pairs,
)
from pipeline.inputs.row_digests import count_seen
from pipeline.inputs.run_data import RunData
from pipeline.registry.start_models import fetch_start
from pipeline.settings.settings import Settings
from ppo_core.data.rows.read_rows import ROW
from ppo_core.data.text_config import text_config
from ppo_core.errors import ConfigError, DataError, ModelError
from ppo_core.models.files.critic_files import check_critic
from ppo_core.models.files.finite_weights import require_finite_weights
from ppo_core.models.files.model_folder import check_model_folder
from ppo_core.models.files.rollout_files import read_rollouts
from ppo_core.models.loading import (
    backbone_differences,
    check_reward_config,
    load_config,
    load_tokenizer,
    member_folders,
)

STARTS = "starts"
"""Folder of the downloaded models, in the cache."""

MOST_TRAINED = 0.02
"""The champion's reward model may have been trained on at most this fraction of the pairs of a
measurement. The preference files of successive weeks may share a few pairs. A file whose rows were
reordered shares many more."""

REMEDY = "Remove start_from to start this run from nothing."


@dataclass(frozen=True, kw_only=True)
class FoundStart:
    """The models from which the reward model and the critic of a run start."""

    start: ChampionStart | None
    """The models of the champion's run; None if the run starts from nothing."""

    text: str
    """What the run starts from, or why it starts from nothing; empty without `start_from`."""

    @property
    def tags(self) -> dict[str, str]:
        """Lineage tags: version and digest of the start; empty without `start_from`."""
        if self.start is None:
            return {"start/version": "none"} if self.text else {}
        return {"start/version": str(self.start.version), "start/manifest": self.start.digest}


def find_start(settings: Settings, champion: int | None) -> FoundStart:
    """Return the models from which reward model and critic start; download and check the models.

    Args:
        settings: settings whose inputs are on this machine.
        champion: version of the champion; None if there is none.

    Raises:
        ConfigError: the models do not fit the policy or the settings.
        DataError: the champion's reward model was trained on pairs that this run measures with.
        ModelError: MLflow does not answer, or a file is missing, damaged or refused.
    """
    if not settings.start_from:
        return FoundStart(start=None, text="")
    name = settings.registered_model
    if champion is None:
        return _nothing(
            f"'{name}' has no champion yet. Later runs can start from this run's version"
        )
    which = f"version {champion} of '{name}'"
    try:
        start = fetch_start(name, champion, Path(settings.output_dir) / "cache" / STARTS)
        if start is None:
            return _nothing(
                f"{which} was registered without reward model and critic, by an earlier release or "
                "by a run without start_from. This run registers both"
            )
        seen, data = read_start_rows(start.path), RunData(settings)
        if data.erased and count_seen(seen, data.erased):
            return _nothing(f"{which} was trained on rows that the setting `erase` lists")
        _check_files(Path(start.path))
    except ModelError as error:
        raise ModelError(f"start_from='champion', {which}: {error} {REMEDY}") from error
    _require_fitting(data, Path(start.path), which)
    trained = trained_pairs(seen)
    _refuse_trained(data, trained, which)
    rows = data.reward_training_pairs()
    old = count_trained(rows, trained)
    return FoundStart(
        start=start,
        text=f"start_from: reward model and critic of {which}, manifest {start.digest}. Of "
        f"{len(rows):,} pairs, {len(rows) - old:,} are new; {REPLAYED:.0%} of the other "
        "pairs are trained on again.",
    )


def _nothing(reason: str) -> FoundStart:
    return FoundStart(start=None, text=f"start_from has no effect, because {reason}.")


def _models(start: Path) -> list[Path]:
    """Return the folders of a start's models: the members of the reward model, then the critic."""
    return [*(member_folders(start / REWARD_MODEL) or [start / REWARD_MODEL]), start / CRITIC]


def _check_files(start: Path) -> None:
    """Run the same checks as for a model that the user names; raise if a check fails."""
    *members, critic = _models(start)
    for folder in (*members, critic):
        check_model_folder(folder)
        require_finite_weights(folder)
    for folder in members:
        check_reward_config(folder)
    check_critic(critic)
    read_rollouts(critic, text_config(load_config(critic)).vocab_size)


def _require_fitting(data: RunData, start: Path, which: str) -> None:
    """Raise ConfigError if a model has another backbone or tokenizer than the run's policy."""
    settings = data.settings
    *members, critic = _models(start)
    for folder in (*members, critic):
        if different := backbone_differences(folder, settings.policy):
            raise ConfigError(
                f"start_from='champion': the {folder.relative_to(start)} of {which} has another "
                f"architecture than the policy '{settings.policy}': {different[0]}. {REMEDY}"
            )
    if len(members) != (wanted := settings.reward_model_training.members):
        raise ConfigError(
            f"start_from='champion': the reward model of {which} has {len(members)} members, and "
            f"reward_model_training.members={wanted}. Set members to {len(members)}, or "
            "remove start_from to start this run from nothing."
        )
    own = data.policy_tokenizer
    for folder in members:
        tokenizer = load_tokenizer(folder, settings.prompt_format)
        is_same = tokenizer.get_vocab() == own.get_vocab()
        if not (is_same and tokenizer.chat_template == own.chat_template):
            part = "chat template" if is_same else "vocabulary"
            raise ConfigError(
                f"start_from='champion': the reward model of {which} has another tokenizer than "
                f"the policy '{settings.policy}': the {part} differs, so the reward model would "
                f"read other texts than the policy. {REMEDY}"
            )


def _refuse_trained(data: RunData, trained: frozenset[bytes], which: str) -> None:
    """Raise DataError if a measurement has too many pairs that trained the reward model.

    The largest allowed fraction is MOST_TRAINED.
    """
    uses = {
        "preferences-test": "its accuracy would be measured on pairs that it knows",
        "judge-preferences": "the judge would be trained on pairs of the reward model",
        "human-labels": "its agreement with people would be measured on pairs that it knows",
    }
    for use, (given, read) in data.digested().items():
        if use not in uses:
            continue
        taken = set(read.column(ROW))
        count = count_trained((row for row in given if row[ROW] in taken), trained)
        if count > MOST_TRAINED * len(taken):
            raise DataError(
                f"start_from='champion': The reward model of {which} was trained on {count} of "
                f"{len(taken)} rows of {use}: {uses[use]}. Keep one file as preferences_test, add "
                f"new pairs at the end of preferences, and name a judge. {REMEDY}"
            )
