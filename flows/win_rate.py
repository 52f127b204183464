"""Win rate of a model against the references of a data set, by a judge.

    python flows/win_rate.py --model PATH_OR_URI --judge openai:MODEL --num-examples 1000

No run of the flow is needed: any model and judge work, on rows with prompt and reference.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from pipeline.settings.environment import prepare_environment
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.judge_config import JudgingConfig
from ppo_core.config.argument_parser import DocumentedParser
from ppo_core.config.checks import require, require_count, require_finite
from ppo_core.data.atomic_files import explained_full_disk
from ppo_core.data.prompts import check_prompt_lengths, context_length, encode_prompt
from ppo_core.errors import PPOError
from ppo_core.models.loading import load_config, load_policy, load_tokenizer
from ppo_core.training.evaluation import answer_prompts


@dataclass(frozen=True, kw_only=True)
class WinRateArguments:
    """The model, the judge, the prompts, and how answers are sampled.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    """Folder or hub id of a decoder-only model, or an MLflow URI: models:/NAME/VERSION or
    models:/NAME@ALIAS."""

    judge: str
    """openai:MODEL, transformers:PATH, reward-model:PATH, python:FILE_OR_MODULE:FUNCTION or rule
    (the built-in task's judge). Several judges, joined by commas, vote."""

    eval_prompts: str = ""
    """File or hub data set with prompt and reference; empty uses the built-in task's prompts."""

    allow_data_urls: bool = False
    """Whether `eval_prompts` and `human_labels` may be addresses such as https:// or s3://."""

    response_length: int = 53
    """Maximum number of tokens of an answer."""

    stop_token_id: int | None = None
    """Id of the token that ends an answer; None for the tokenizer's end-of-sequence token."""

    batch_size: int = 64
    """Number of prompts in a generation batch."""

    seed: int = 1
    """Seed of the sampled answers and of the bootstrapped interval."""

    end_of_text: bool = True
    """Whether a reward model used as judge reads an end-of-sequence token after each answer."""

    output_dir: str = "outputs"
    """Folder for the judgements and for a cache of judge replies, which avoids paying twice."""

    summary_json: str = ""
    """JSON file for all results and settings; empty writes no file."""

    def __post_init__(self) -> None:
        """Raise if a value is out of range."""
        require_finite(self)
        require_count(self, "response_length")
        require_count(self, "batch_size")
        require(self, "seed", 0 <= self.seed < 2**32, "at least 0 and below 2 ** 32")


def main(argv: Sequence[str]) -> int:
    """Print the win rate; return 0, or 1 after an error or an inconclusive result."""
    try:
        with explained_full_disk():
            arguments, config, judging = DocumentedParser(
                [WinRateArguments, EvaluationConfig, JudgingConfig],
                prog="python flows/win_rate.py",
                usage="%(prog)s --model PATH_OR_URI --judge JUDGE [--name value ...]",
            ).parse(argv)
            evaluation = run(arguments, config, judging)
            written = Path(arguments.output_dir) / JUDGEMENTS
            write_jsonl(written, judgements(evaluation))
            print(f"{render(evaluation)}\nEvery judgement is in {written}.")
            if arguments.summary_json:
                settings = {**asdict(arguments), **asdict(config), "judging": asdict(judging)}
                summary = {**evaluation.result, "settings": settings}
                write_report(Path(arguments.summary_json), summary, indent=2)
    except PPOError as error:
        print(f"win_rate: {error}", file=sys.stderr)
        return 1
    return 0 if evaluation.result["conclusive"] else 1


def run(
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


def render(evaluation: Evaluation) -> str:
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


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main(sys.argv[1:]))
