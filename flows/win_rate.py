"""Let a judge measure the win rate of a model against the references of a data set.

    python flows/win_rate.py --model PATH_OR_URI --judge openai:MODEL --num-examples 1000

No run of the flow is needed: the command accepts any model, any judge, and rows with prompt and
reference. With `--against-itself`, the command compares the model with itself, which tests the
judge and the gate.
"""

import sys
from collections.abc import Sequence

from pipeline import stages
from pipeline.settings.environment import run_and_exit
from pipeline.settings.evaluation_config import EvaluationConfig
from pipeline.settings.judge_config import JudgingConfig
from pipeline.settings.win_rate_arguments import WinRateArguments
from ppo_core.config.argument_parser import DocumentedParser
from ppo_core.errors import PPOError
from ppo_core.io.atomic_files import explained_full_disk


def main(argv: Sequence[str]) -> int:
    """Print the win rate; return 0, or 1 after an error or an inconclusive result."""
    try:
        with explained_full_disk():
            settings = DocumentedParser(
                [WinRateArguments, EvaluationConfig, JudgingConfig],
                prog="python flows/win_rate.py",
                usage="%(prog)s --model PATH_OR_URI --judge JUDGE [--name value ...]",
            ).parse(argv)
            stages.given_settings.check_judge_and_packages(settings[0].judge, "", settings[2])
            contests = stages.model_win_rate.compare_model(*settings)
            result = stages.model_win_rate.result_with_settings(contests, *settings)
            written = stages.model_win_rate.write_win_rate(contests, result, settings[0])
            print(stages.model_win_rate.describe_result(result))
            print(f"Every judgement is in {written}.")
    except PPOError as error:
        print(f"win_rate: {error}", file=sys.stderr)
        return 1
    return 0 if result.conclusive else 1


if __name__ == "__main__":
    run_and_exit(main)
