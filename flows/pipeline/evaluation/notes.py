"""Write notes for the reader of an evaluation without references or with a trained judge."""

from collections.abc import Sequence

from pipeline.results.evaluation import CanaryReport, TrainedJudge

WITHOUT_REFERENCES = (
    "There are no references, so the policies are compared only with each other, and the judge is "
    "tested with canaries against answers of SFT."
)

_BESIDE_A_TRAINED_ONE = (
    "The judge is a reward model that the run trained with another seed, on preference pairs that "
    "were kept out of the training of PPO's reward model."
)

_BESIDE_A_GIVEN_ONE = "The judge is a reward model that the run trained on its preferences."


def notes_on(
    judge: TrainedJudge | None,
    canaries: CanaryReport,
    *,
    is_reward_model_given: bool,
    has_references: bool,
) -> list[str]:
    """Return sentences on how strong the evidence is; may be empty.

    The list is empty if the settings name a judge and there are references.

    Args:
        judge: the judge that the run trained; None if the settings name a judge.
        canaries: the judge's results on canaries.
        is_reward_model_given: whether PPO's reward model was given, not trained by the run.
        has_references: whether the evaluation has references.
    """
    notes: list[str] = []
    if judge is not None:
        notes.append(
            f"{_BESIDE_A_GIVEN_ONE if is_reward_model_given else _BESIDE_A_TRAINED_ONE} It may "
            "share errors with the reward model that PPO used, so this is weaker evidence than "
            f"people or a judge of another kind. {describe_accuracy(judge)}"
        )
        notes += _canaries_that_won(canaries)
    if not has_references:
        notes.append(WITHOUT_REFERENCES)
    return notes


def note_on_copies(copies: int) -> list[str]:
    """Return a sentence on the prompts that were left out as copies of training texts, if any."""
    if not copies:
        return []
    return [
        f"Prompts that were left out because their text is also in the training data: {copies}. "
        "quarantine/eval_prompts.jsonl in the folder of the run lists them."
    ]


def _canaries_that_won(canaries: CanaryReport) -> list[str]:
    """Return a sentence on the canaries that a trained judge preferred; empty if there is none."""
    fell = [f"'{kind}'" for kind, found in canaries.kinds.items() if found.fell]
    if not fell:
        return []
    return [
        f"The judge prefers the canaries {', '.join(fell)} to an answer. Canaries are test texts "
        "that should lose. This does not disqualify the judge: it is a reward model, and its "
        "scores mean little for texts that are unlike its training pairs. Read some answers, in "
        "samples.jsonl in the folder of the run, before you trust the win rate."
    ]


def describe_accuracy(judge: TrainedJudge) -> str:
    """Return a sentence with the accuracy of a judge that the run trained."""
    return (
        f"The judge is right in {judge.accuracy:.1%} of {judge.n} held-out pairs, 95 % interval "
        f"{judge.low:.1%} .. {judge.high:.1%}."
    )


def doubts_about_trained_judge(judge: TrainedJudge | None) -> Sequence[str]:
    """Return why a trained judge cannot decide; empty if it can, or if the run trained none."""
    if judge is None or judge.low > 0.5:
        return ()
    return (
        f"{describe_accuracy(judge)} The lower end must be above 50.0%: this judge may be no "
        "better than a tossed coin. Add preferences, or name a judge.",
    )
