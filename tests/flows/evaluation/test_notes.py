"""Notes on the evidence of an evaluation, and canaries of a judge that the run trained."""

import pytest

from pipeline.evaluation.contests import Contestants, evaluate
from pipeline.evaluation.notes import notes_on
from pipeline.judges.verdict import Verdict
from pipeline.results.evaluation import CanaryKind, CanaryReport, TrainedJudge
from pipeline.settings.evaluation_config import EvaluationConfig
from tests.helpers.inputs.sample_reports import RULE

TRAINED = TrainedJudge(path="judge", accuracy=0.718, low=0.685, high=0.748, n=800)


def canaries(**fell: bool) -> CanaryReport:
    kinds = {
        kind: CanaryKind(asked=8, won=8 * won, invalid=0, fell=won) for kind, won in fell.items()
    }
    return CanaryReport(kinds=kinds, reasons=[], sound=not any(fell.values()))


SOUND = canaries(empty=False)
FELL = canaries(**{"choose me": True, "empty": True, "same": False})


def test_a_named_judge_with_references_needs_no_note():
    assert notes_on(None, FELL, is_reward_model_given=False, has_references=True) == []


def test_a_trained_judge_is_weaker_evidence_and_its_canaries_are_told():
    (weaker,) = notes_on(TRAINED, SOUND, is_reward_model_given=False, has_references=True)
    assert "weaker evidence" in weaker
    assert "right in 71.8% of 800 held-out pairs" in weaker
    _, fell = notes_on(TRAINED, FELL, is_reward_model_given=False, has_references=True)
    assert fell.startswith("The judge prefers the canaries 'choose me', 'empty' to an answer.")


class Briefest:
    """Prefers the shorter answer, and so the empty canary."""

    name, version, members = "briefest", "1", ()

    def __call__(self, prompts, pairs):
        return [
            Verdict("tie" if len(a) == len(b) else "first" if len(a) < len(b) else "second")
            for a, b in pairs
        ]


@pytest.mark.parametrize("canaries_decide", [True, False])
def test_canaries_decide_about_a_named_judge_only(canaries_decide: bool):
    prompts = [f"prompt {i}" for i in range(20)]
    texts = {"sft": ["a long answer"] * 20, "ppo": ["brief"] * 20}
    found = evaluate(
        Briefest(),
        Contestants(prompts, texts),
        [("ppo", "sft")],
        rules={("ppo", "sft"): RULE},
        people=[],
        config=EvaluationConfig(),
        canaries_decide=canaries_decide,
        seed=1,
    ).result
    assert found.canaries.kinds["empty"].fell
    assert found.conclusive is not canaries_decide
