"""Check the inputs of a run before anything is trained."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from pipeline.evaluation.notes import WITHOUT_REFERENCES
from pipeline.inputs.flow_run import QUARANTINE
from pipeline.inputs.json_lines import read_jsonl, write_jsonl
from pipeline.inputs.labeled_pairs import label_pairs
from pipeline.inputs.run_data import RunData, references_of
from pipeline.inputs.training_prompts import prompt_key
from pipeline.judges.judge_names import read_judges
from pipeline.judges.make_judge import check_judge
from pipeline.launch.commands import gpus
from pipeline.launch.job import updates_of_ppo
from pipeline.preflight.check_models import check_models, require_template
from pipeline.preflight.guard_trial import try_guards, try_tasks
from pipeline.preflight.judge_trial import try_judges
from pipeline.preflight.reward_trial import try_rewards
from pipeline.settings.settings import Settings
from pipeline.settings.training_sections import SupervisedSection
from pipeline.storage.workspace import original_names
from ppo_core.config.reward_names import read_rewards
from ppo_core.data.encode_prompts import encode_prompt
from ppo_core.data.prompts import Tokens
from ppo_core.data.rows.describe import describe_first, describe_reading, require_columns_read
from ppo_core.data.rows.read_rows import Rows, TooManyLeftOutError
from ppo_core.data.rows.row_columns import Row
from ppo_core.data.sources.raw_row import ROWS_AT_ONCE
from ppo_core.data.sources.source import named_data
from ppo_core.distributed.choose_sharding import choose_sharding
from ppo_core.errors import ConfigError, DataError, PPOError
from ppo_core.io.atomic_files import is_written_in_place, require_writable
from ppo_core.models.loading import load_config, load_tokenizer
from ppo_core.reporting.callbacks import check_integrations
from ppo_core.rollout.token_sampling import stop_token
from ppo_core.supervised.examples.encoded_rows import TrainingKind
from ppo_core.supervised.learning_rate_search import refuse_sharded_search
from ppo_core.supervised.training import refuse_other_settings
from ppo_core.training.preflight import require_stop_token

MIN_DISTINCT = 0.5
"""Fraction of distinct training prompts below which a warning is printed."""

MAX_UNKNOWN_TOKENS = 0.1
"""Fraction of unknown tokens in the first prompts above which a warning is printed."""

FIRST_PROMPTS = 64
"""Number of training prompts whose unknown tokens are counted."""


def check_inputs(settings: Settings, quarantine: Path | None = None) -> None:
    """Raise if an input would cause an error or a misleading result later in the run.

    Args:
        settings: settings with inputs on this machine.
        quarantine: folder for the rows that were left out; by default QUARANTINE in `output_dir`.

    Raises:
        ConfigError: a setting is invalid.
        DataError: a data set cannot be used.
        ModelError: a model cannot be used.
    """
    check_outputs(settings.output_dir, settings.summary_json)
    # Remove the files of an earlier check, which would look like files of this check.
    quarantine = quarantine or Path(settings.output_dir) / QUARANTINE
    shutil.rmtree(quarantine, ignore_errors=True)
    with _refused_rows_kept(quarantine):
        _check_everything(settings, quarantine)


def _check_everything(settings: Settings, quarantine: Path) -> None:
    _check_trainings(settings)
    check_integrations(settings.ppo.report_to)
    data = RunData(settings)
    check_models(data)
    # The labels of people also test the reward model, so their texts must fit its context.
    data.voted_pairs()
    data.fresh_labels()
    _check_fresh_pairs(data)
    # Training texts are checked first, because prompts of the evaluation are compared with them.
    _check_pairs(data, quarantine)
    _check_feedback(data, quarantine)
    if settings.sft_data:
        _check_demonstrations(data, quarantine)
    _check_prompts(data, quarantine)
    _check_rewards(data)
    try_guards(data)
    try_tasks(settings)
    if settings.columns:
        read = data.by_use().values()
        require_columns_read(settings.columns, *read)
    # Judges are checked last, because a request to a server may cost money.
    _check_judge(data, "judge", settings.judge, settings.reward_model)
    _check_judge(data, "fresh_pairs.labeller", settings.fresh_pairs.judge)


def _check_judge(data: RunData, setting: str, spec: str, reward_model: str = "") -> None:
    """Check a judge or a labeller, and ask it about one pair; do nothing if `spec` is empty."""
    if not spec:
        return
    for part in read_judges(spec):
        if part.kind == "reward-model":
            require_template(data, load_tokenizer(part.source), part.source)
    try:
        check_judge(spec, reward_model, data.settings.judging)
    except PPOError as error:
        # The message already names the setting `judge`, but no other setting.
        raise error if setting == "judge" else type(error)(f"{setting}: {error}") from error
    try_judges(data, setting, spec)


def _check_rewards(data: RunData) -> None:
    for one in read_rewards(data.settings.rewards):
        if one.kind == "reward-model" and not one.is_own:
            require_template(data, load_tokenizer(one.source, data.reward_format), one.source)
    try_rewards(data)


def check_outputs(output_dir: str, summary_json: str) -> None:
    """Raise if the folder or the file for results cannot be written.

    Raises:
        ConfigError: the folder or the file cannot be written.
    """
    require_writable(Path(output_dir), "output_dir")
    if summary_json:
        if Path(summary_json).is_dir():
            raise ConfigError(f"summary_json={summary_json!r} is a folder. Set it to a file.")
        if Path(summary_json).is_fifo():
            raise ConfigError(f"summary_json={summary_json!r} is a pipe. Set it to a file.")
        if not is_written_in_place(Path(summary_json)):
            require_writable(Path(summary_json).parent, "summary_json")
        elif not os.access(summary_json, os.W_OK):
            raise ConfigError(
                f"summary_json={summary_json!r} is read-only, so the summary would be lost. Set it "
                "to a file that you may write."
            )


def _check_trainings(settings: Settings) -> None:
    """Raise if a setting of a training contradicts another setting, or has no effect."""
    if settings.sft_data:
        _check_training("sft", "demonstrations", settings.sft, settings)
    if not (settings.reward_model and settings.judge) or settings.fresh_pairs.wanted:
        section = settings.reward_model_training
        _check_training("reward_model_training", "pairs", section, settings)


def _check_training(
    name: str, kind: TrainingKind, section: SupervisedSection, settings: Settings
) -> None:
    """Check one training; the message of an error begins with the section's name."""
    try:
        refuse_other_settings(kind, section)
        sharding = choose_sharding(
            section.sharding,
            deepspeed=None,
            offload=section.offload,
            processes=(settings.processes or gpus() or 1) * settings.num_nodes,
        )
        if section.learning_rate == "auto":
            refuse_sharded_search(sharding)
    except ConfigError as error:
        raise ConfigError(f"[{name}]: {error}") from error


def _check_prompts(data: RunData, quarantine: Path) -> None:
    """Raise if prompts cannot be used, or if only some rows of the evaluation have a reference."""
    settings = data.settings
    stop_token(data.policy_tokenizer, settings.ppo.stop_token, settings.ppo.stop_token_id)
    require_stop_token(load_config(settings.policy), settings.ppo.stop_token_id)
    with named_data("prompts"):
        rows = data.training_prompts()
        _report(rows, "prompts", quarantine)
        prompts = rows.column("prompt", FIRST_PROMPTS)
        encoded = [encode_prompt(data.policy_tokenizer, prompt) for prompt in prompts]
        _show("prompts", data, encoded[0])
        for warning in describe_unknown(data.policy_tokenizer, encoded, rows.source):
            print(warning, flush=True)
    with named_data("eval_prompts" if settings.eval_prompts else "prompts"):
        _report(data.evaluation_rows(), "eval_prompts", quarantine)
        if settings.selection.method != "last":
            data.selection_prompts()
        if references_of(data.examples()) is None:
            print(f"eval_prompts: {WITHOUT_REFERENCES}", flush=True)
    for warning in describe_repeats(rows, data.examples()):
        print(warning, flush=True)


def _check_pairs(data: RunData, quarantine: Path) -> None:
    """Raise if preferences cannot be used, or none are left for the training or the validation."""
    settings = data.settings
    with named_data("preferences_test" if settings.preferences_test else "preferences"):
        test = data.test_pairs()
        _report(test, "preferences-test", quarantine)
        if all(pair.tie for pair in label_pairs(test)):
            same = sum(row["chosen"] == row["rejected"] for row in test)
            why = (
                f" In {same} of them, chosen and rejected have the same text; check that chosen "
                "and rejected are two different columns."
            )
            raise DataError(
                f"The {len(test)} held-out preferences of {test.source} are all ties, so the "
                f"reward model's accuracy cannot be measured.{why if same else ''} Add preferences "
                "that are not ties."
            )
    with named_data("preferences"):
        if not settings.reward_model:
            pairs = data.encoded_pairs()
            _report(pairs, "preferences", quarantine)
            _show("preferences", data, pairs.table[0]["chosen"])
        if not settings.judge:
            _report(data.encoded_judge_pairs(), "judge-preferences", quarantine)
            data.judge_test_pairs()


def _check_feedback(data: RunData, quarantine: Path) -> None:
    with named_data("feedback"):
        if rows := data.encoded_feedback():
            _report(rows, "feedback", quarantine)
            _show("feedback", data, rows.table[0]["chosen"] or rows.table[0]["rejected"])


def _check_fresh_pairs(data: RunData) -> None:
    """Raise if there are too few prompts for the pairs of samples, or too few updates of PPO."""
    settings, rounds = data.settings, data.settings.fresh_pairs.rounds
    if settings.fresh_pairs.count and not settings.fresh_pairs.labels:
        with named_data("prompts"):
            data.fresh_prompts()
    if rounds > 1 and rounds > (updates := updates_of_ppo(settings, len(data.training_prompts()))):
        raise ConfigError(
            f"fresh_pairs.rounds={rounds} are more than the {updates} updates of PPO, so a round "
            "would change nothing. Lower rounds, or raise ppo.total_episodes."
        )


def _check_demonstrations(data: RunData, quarantine: Path) -> None:
    with named_data("sft_data"):
        rows = data.encoded_demonstrations()
        _report(rows, "sft", quarantine)
        _show("sft", data, rows.table[0]["input_ids"])


def _report(rows: Rows, name: str, quarantine: Path) -> None:
    """Print how the rows were read, and copy the rows that were left out to a folder."""
    reading = original_names(describe_reading(rows))
    print(f"{name}: {reading}, digest {rows.digest}", flush=True)
    if rows.left_out:
        path = quarantine / f"{name}.jsonl"
        _copy(rows.left_out_files, path)
        print(f"{name}: the rows left out are in {path}", flush=True)


@contextmanager
def _refused_rows_kept(quarantine: Path) -> Iterator[None]:
    """If too many rows of a data set are left out, copy them to a folder; the error names the file.

    Raises:
        DataError: the error of the block.
    """
    try:
        yield
    except DataError as error:
        refused: BaseException | None = error
        # The error that adds the name of the data set has the reader's error as its cause.
        while refused is not None and not isinstance(refused, TooManyLeftOutError):
            refused = refused.__cause__
        if refused is None:
            raise
        path = quarantine / "refused.jsonl"
        _copy(refused.files, path)
        raise DataError(f"{error} The rows left out are in {path}.") from error


def _copy(files: Sequence[Path], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, chain.from_iterable(map(read_jsonl, files)))


def _show(name: str, data: RunData, ids: Sequence[int]) -> None:
    print(f"{name}: {describe_first(data.policy_tokenizer, ids)}", flush=True)


def describe_unknown(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Tokens], source: str
) -> Iterator[str]:
    """Yield a warning if many tokens of the prompts are the tokenizer's unknown token."""
    unknown = tokenizer.unk_token_id
    # In GPT-2, the end-of-sequence token is also the unknown token, but bytes spell every word.
    if unknown in (None, tokenizer.bos_token_id, tokenizer.eos_token_id):
        return
    share = sum(ids.count(unknown) for ids in prompts) / sum(map(len, prompts))
    if share > MAX_UNKNOWN_TOKENS:
        yield (
            f"warning: {share:.0%} of the tokens of the first {len(prompts)} prompts of {source} "
            f"are {tokenizer.unk_token}, because the policy's tokenizer does not know the words. "
            "The policy cannot read these words. Name a policy that was trained on such texts, or "
            "correct the prompts."
        )


def describe_repeats(training: Rows, evaluated: Sequence[Row]) -> Iterator[str]:
    """Yield warnings if many training prompts are equal, or some are prompts of the evaluation."""
    asked = {prompt_key(row["prompt"]) for row in evaluated}
    # Store hashes, because all prompts of a large data set would fill the memory.
    distinct: set[int] = set()
    shared: set[str] = set()
    for batch in training.table.select_columns(["prompt"]).iter(ROWS_AT_ONCE):
        keys = {prompt_key(prompt) for prompt in batch["prompt"]}
        distinct.update(map(hash, keys))
        shared |= keys & asked
    if len(distinct) < MIN_DISTINCT * len(training):
        yield (
            f"warning: only {len(distinct)} of the {len(training)} prompts of {training.source} "
            "are distinct, so PPO samples from the same prompts again and again. Check the file, "
            "or add prompts."
        )
    if shared:
        yield (
            f"warning: {len(shared)} of the {len(asked)} prompts to evaluate on are also training "
            f"prompts, in {training.source}, so the win rate would not hold for unseen prompts. "
            "Remove these prompts from one of the two data sets, or name other eval_prompts."
        )
