"""Measure the win rate of any model against the references of a data set, without a run."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pipeline import preflight
from pipeline.demo import task
from pipeline.evaluation.canaries import require_references
from pipeline.evaluation.contests import Evaluation, evaluate, judgements
from pipeline.evaluation.win_rate import describe
from pipeline.inputs import data_sets
from pipeline.inputs.rows import write_jsonl
from pipeline.judges.spec import check_judge, make_judge
from pipeline.promotion.champion import CHAMPIONS
from pipeline.registry.versions import find_policy
from pipeline.reports.document import as_equal_length_rate, as_number, as_percent
from pipeline.results import JUDGEMENTS, write_report
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.win_rate_arguments import WinRateArguments
from ppo_core.data.prompts import check_prompt_lengths, context_length, encode_prompt
from ppo_core.models.loading import load_config, load_policy, load_tokenizer
from ppo_core.training.evaluation import answer_prompts


def compare_with_references(
    arguments: WinRateArguments, config: EvaluationConfig, judging: JudgingConfig
) -> Evaluation:
    """Sample the model's answers, and let the judge compare them with the references.

    Raises:
        ConfigError: a setting is invalid.
        DataError: the rows cannot be used.
        ModelError: the model cannot be loaded.
        JudgeError: the judge does not reply.
    """
    output = Path(arguments.output_dir)
    preflight.check_outputs(arguments.output_dir, arguments.summary_json)
    check_judge(arguments.judge, "", judging)
    people = data_sets.human_labels(config, allow_urls=arguments.allow_data_urls)
    source = arguments.eval_prompts or str(
        task.find_demo_task(output / "cache", arguments.seed) / "prompts-eval.jsonl"
    )
    rows = data_sets.examples(source, config, allow_urls=arguments.allow_data_urls)
    prompts, references = ([row[name] for row in rows] for name in ("prompt", "reference"))
    require_references(references)
    texts = {"model": _answer(arguments, config, prompts), "reference": references}
    judge = make_judge(
        arguments.judge,
        config=judging,
        cache_folder=output / "cache" / "replies",
        end_of_text=arguments.end_of_text,
    )
    contests = [("model", "reference")]
    return evaluate(
        judge, prompts, texts, contests, people=people, config=config, seed=arguments.seed
    )


def write_win_rate(
    evaluation: Evaluation,
    arguments: WinRateArguments,
    config: EvaluationConfig,
    judging: JudgingConfig,
) -> Path:
    """Write the judgements, and the summary if its file is set; return the file of judgements."""
    written = Path(arguments.output_dir) / JUDGEMENTS
    write_jsonl(written, judgements(evaluation))
    if arguments.summary_json:
        settings = {**asdict(arguments), **asdict(config), "judging": asdict(judging)}
        summary = {**evaluation.result, "settings": settings}
        write_report(Path(arguments.summary_json), summary, indent=2)
    return written


def describe_evaluation(evaluation: Evaluation) -> str:
    """Return a line with the win rate, and lines with further results."""
    (rate,) = evaluation.win_rates.values()
    (figures,) = evaluation.result["win_rate"].values()
    lines = [
        f"Model win rate: {describe(rate)}",
        f"Won {rate.wins}, lost {rate.losses}, tied {rate.ties}, no verdict {rate.invalid}; the "
        f"judge followed the order of answers in {rate.flip_rate:.1%}.",
        f"Length-controlled win rate: {as_equal_length_rate(figures)}.",
    ]
    if people := evaluation.result["people"]:
        lines.append(
            f"The judge agrees with people in {as_percent(people['share'])} of {people['n']} "
            f"pairs, kappa {as_number(people['kappa'])}; no verdict on {people['invalid']} others."
        )
    lines += [f"Inconclusive: {reason}" for reason in evaluation.result["reasons"]]
    return "\n".join(lines)


def _answer(
    arguments: WinRateArguments, config: EvaluationConfig, prompts: Sequence[str]
) -> list[str]:
    cache = Path(arguments.output_dir) / "cache" / CHAMPIONS
    model, tokenizer_path = find_policy(arguments.model, cache)
    context = context_length(load_config(model))
    tokenizer = load_tokenizer(tokenizer_path)
    check_prompt_lengths(
        [encode_prompt(tokenizer, prompt) for prompt in prompts],
        context=context,
        response_length=arguments.response_length,
    )
    return answer_prompts(
        load_policy(model),
        tokenizer,
        prompts,
        response_length=arguments.response_length,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
        stop_token_id=arguments.stop_token_id,
    ).texts
