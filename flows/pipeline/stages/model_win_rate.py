"""Measure the win rate of a model against references, or against itself, without a run."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import mkdtemp

from transformers import PreTrainedTokenizerBase

from pipeline.demo import task
from pipeline.evaluation.contests import Contestants, Contests, evaluate, judgements
from pipeline.evaluation.sequential.sequential_test import WEEKS, StoppingRule, promoted_share
from pipeline.evaluation.win_rate import describe, values_of_prompts
from pipeline.inputs import run_data
from pipeline.inputs.human_labels_to_pairs import votes_of
from pipeline.inputs.json_lines import write_jsonl
from pipeline.judges.make_judge import check_judge, make_judge
from pipeline.launch.answers import answer, answer_processes
from pipeline.launch.stall_watch import STALL_MINUTES
from pipeline.preflight.check_inputs import check_outputs
from pipeline.promotion.fetch_champion import CHAMPIONS
from pipeline.registry.fetch_policy import find_policy
from pipeline.reports.document import (
    as_equal_length_rate,
    as_evidence,
    as_number,
    as_percent,
    describe_annotator_test,
)
from pipeline.results.evaluation import ModelWinRate
from pipeline.results.report_files import write_report
from pipeline.results.step_records import JUDGEMENTS
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.gate_configs import PromotionConfig
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.win_rate_arguments import WinRateArguments
from ppo_core.config.row_settings import ReadOptions, parse_columns
from ppo_core.data.chat_template import Messages
from ppo_core.data.prompts import context_length
from ppo_core.data.rows.describe import describe_reading, require_columns_read
from ppo_core.data.rows.overlong import fit_prompts
from ppo_core.data.rows.read_rows import Rows, read_rows
from ppo_core.data.rows.row_columns import Row
from ppo_core.errors import ConfigError
from ppo_core.models.loading import load_config, load_tokenizer
from ppo_core.training.answer_job import AnswerJob


def compare_model(
    arguments: WinRateArguments, config: EvaluationConfig, judging: JudgingConfig
) -> Contests:
    """Sample the model's answers, and let the judge compare them with the references.

    With `against_itself`, the judge compares two samples of the model instead, from two seeds.

    Raises:
        ConfigError: a setting is invalid.
        DataError: the rows cannot be used.
        ModelError: the model cannot be loaded.
        JudgeError: the judge does not reply.
    """
    _refuse_what_has_no_effect(arguments, config)
    output = Path(arguments.output_dir)
    check_outputs(arguments.output_dir, arguments.summary_json)
    check_judge(arguments.judge, "", judging)
    source = arguments.eval_prompts or str(
        task.find_demo_task(output / "cache", arguments.seed) / "prompts-eval.jsonl"
    )
    cache = output / "cache" / CHAMPIONS
    model, tokenizer_path = map(str, find_policy(arguments.model, cache))
    tokenizer = load_tokenizer(tokenizer_path, arguments.prompt_format)
    options = ReadOptions(
        parse_columns(arguments.columns), arguments.allow_data_urls, arguments.max_left_out
    )
    labels = run_data.read_labels("human_labels", config.human_labels, tokenizer, options)
    rows = _read_rows(arguments, source, model, tokenizer, options)
    require_columns_read(options.renamed, rows, *([] if labels is None else [labels]))
    judged = run_data.judged_rows(rows, config)
    prompts = [row["prompt"] for row in judged]
    texts = _texts(arguments, config, (model, tokenizer_path), judged)
    contest = ("model", "itself" if arguments.against_itself else "reference")
    judge = make_judge(
        arguments.judge,
        config=judging,
        cache_folder=output / "cache" / "replies",
        end_of_text=arguments.end_of_text,
        precision=arguments.precision,
    )
    return evaluate(
        judge,
        Contestants(prompts, texts),
        [contest],
        rules={contest: StoppingRule(least=0.5, gain=None, alpha=arguments.alpha)},
        people=votes_of(labels),
        config=config,
        seed=arguments.seed,
    )


def _refuse_what_has_no_effect(arguments: WinRateArguments, config: EvaluationConfig) -> None:
    if arguments.against_itself and config.is_greedy:
        setting = "top_k=1" if config.temperature else "temperature=0"
        raise ConfigError(
            f"against_itself compares two samples of the model, and {setting} makes them equal, so "
            "every pair would be a tie. Set a temperature above 0, and top_k to 0 or above 1."
        )
    if config.rotate:
        raise ConfigError(
            f"rotate={config.rotate:g} draws prompts for each champion, and this command has no "
            "champion. Leave rotate out."
        )
    if config.baseline_prompts != EvaluationConfig.baseline_prompts:
        raise ConfigError(
            f"baseline_prompts={config.baseline_prompts} is for the comparison of PPO with SFT, "
            "and this command measures one model. Leave baseline_prompts out."
        )


def result_with_settings(
    contests: Contests,
    arguments: WinRateArguments,
    config: EvaluationConfig,
    judging: JudgingConfig,
) -> ModelWinRate:
    """Return the result with the settings of the measurement.

    With `against_itself`, the result also has the fraction of simulated weeks in which the
    promotion gate promotes an equal policy. The gate has its default rule, with the `alpha` of the
    arguments; see `promoted_share`.
    """
    share = None
    if arguments.against_itself:
        (comparison,) = contests.comparisons.values()
        rule = StoppingRule(
            least=0.5, gain=PromotionConfig().gain_above(0.5), alpha=arguments.alpha
        )
        share = promoted_share(values_of_prompts(comparison), rule, seed=arguments.seed)
    return ModelWinRate(
        **vars(contests.result),
        settings={**asdict(arguments), **asdict(config), "judging": asdict(judging)},
        promoted_share=share,
    )


def write_win_rate(contests: Contests, result: ModelWinRate, arguments: WinRateArguments) -> Path:
    """Write the judgements, and the summary if its path is set; return the judgements' path."""
    written = Path(arguments.output_dir) / JUDGEMENTS
    write_jsonl(written, judgements(contests.comparisons))
    if arguments.summary_json:
        write_report(Path(arguments.summary_json), result, indent=2)
    return written


def describe_result(result: ModelWinRate) -> str:
    """Return the result as lines of text; the first line has the win rate."""
    (rate,) = result.win_rate.values()
    lines = [
        f"Model win rate: {describe(rate)}",
        f"Evidence that the model is better: {as_evidence(rate)}.",
        f"Won {rate.wins}, lost {rate.losses}, tied {rate.ties}, no verdict {rate.invalid}; in "
        f"{rate.flip_rate:.1%} of the pairs, the judge chose the same position in both orders.",
        f"Length-controlled win rate: {as_equal_length_rate(rate)}.",
    ]
    if labeled := rate.people:
        lines.append(
            f"{labeled.labels} labels of people and the judge's verdicts together: "
            f"{labeled.rate:.2%} (95% CI {100 * labeled.low:.1f}-{100 * labeled.high:.1f}). "
            f"Without the judge, {labeled.worth:.0f} labels would be as precise."
        )
    if people := result.people:
        lines.append(
            f"The judge agrees with people in {as_percent(people.share)} of {people.n} "
            f"pairs, kappa {as_number(people.kappa)}; no verdict on {people.invalid} others."
        )
        if people.alternative:
            lines.append(describe_annotator_test(people.alternative))
    if (share := result.promoted_share) is not None:
        alpha = result.settings["alpha"]
        lines.append(
            f"In {WEEKS:,} simulated evaluations of equal policies, the gate promotes {share:.2%}; "
            f"alpha={alpha:g} allows {alpha:.2%}."
        )
    lines += [f"Inconclusive: {reason}" for reason in result.reasons]
    return "\n".join(lines)


def _texts(
    arguments: WinRateArguments,
    config: EvaluationConfig,
    files: tuple[str, str],
    rows: Sequence[Row],
) -> dict[str, list[str]]:
    """Return the answers of the model, and the texts to compare the answers with, by name."""
    prompts = [row["prompt"] for row in rows]
    references = run_data.references_of(rows)
    texts = {"model": _answer(arguments, config, files, prompts)}
    if references is not None:
        texts["reference"] = references
    if arguments.against_itself:
        other = replace(arguments, seed=(arguments.seed + 1) % 2**32)
        texts["itself"] = _answer(other, config, files, prompts)
    return texts


def _read_rows(
    arguments: WinRateArguments,
    source: str,
    model: Path | str,
    tokenizer: PreTrainedTokenizerBase,
    options: ReadOptions,
) -> Rows:
    """Return prompts and references; print which columns were read and which rows were left out.

    Raises:
        DataError: a reference is missing. With `against_itself`, all references may be missing.
    """
    is_chat = tokenizer.chat_template is not None
    rows = read_rows(source, "prompts", is_chat=is_chat, options=options)
    fitting = fit_prompts(
        rows,
        tokenizer,
        context=context_length(load_config(model)),
        response_length=arguments.response_length,
        overlong=arguments.overlong,
    )
    print(describe_reading(fitting))
    if arguments.against_itself:
        return run_data.require_all_or_no_references(fitting)
    return run_data.require_reference(fitting)


def _answer(
    arguments: WinRateArguments,
    config: EvaluationConfig,
    files: tuple[str, str],
    prompts: Sequence[str | Messages],
) -> list[str]:
    """Return the model's answers to the prompts; `files` are the paths of model and tokenizer."""
    model, tokenizer = files
    job = AnswerJob(
        policy=model,
        tokenizer=tokenizer,
        prompts=list(prompts),
        prompt_format=arguments.prompt_format,
        response_length=arguments.response_length,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop_token_id=arguments.stop_token_id,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
        precision=arguments.precision,
    )
    # In a shared folder, two commands at the same time would end each other's processes.
    folder = Path(mkdtemp(prefix="answers-", dir=arguments.output_dir))
    answers = answer(
        job,
        processes=answer_processes(0, len(prompts)),
        folder=folder,
        stall_minutes=STALL_MINUTES,
    )
    # After an error, the folder stays, because the error names its files.
    shutil.rmtree(folder, ignore_errors=True)
    return answers.texts
