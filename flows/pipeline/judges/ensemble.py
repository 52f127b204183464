"""An ensemble of judges that decides by majority vote."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from pipeline.judges.verdict import Judge, JudgedPrompt, Verdict
from ppo_core.io.folder_cache import digest_of


class Ensemble:
    """Asks every judge about every pair; the majority decides."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        """Take the judges; `Verdict.votes` has the same order as `judges`."""
        self.members = tuple(judge.name for judge in judges)
        self.name = f"majority of {'; '.join(self.members)}"
        self.version = digest_of([(judge.name, judge.version) for judge in judges])
        self._judges = tuple(judges)

    def __call__(
        self, prompts: Sequence[JudgedPrompt], pairs: Sequence[tuple[str, str]]
    ) -> list[Verdict]:
        """Return one verdict per pair, with the verdicts of the members as `votes`."""
        ballots = [judge(prompts, pairs) for judge in self._judges]
        return [count_votes(votes) for votes in zip(*ballots, strict=True)]


def count_votes(votes: Sequence[Verdict]) -> Verdict:
    """Return the verdict of the majority.

    The verdict is `invalid` if more than half of all votes are invalid. Otherwise, an answer with
    more than half of the valid votes wins. If neither answer has so many votes, the verdict is a
    tie. The probability is the mean over the valid votes with a probability; None if there are
    none.
    """
    valid = [vote for vote in votes if vote.winner != "invalid"]
    if len(valid) < len(votes) / 2:
        reason = f"{len(votes) - len(valid)} of {len(votes)} judges gave no verdict."
        return Verdict("invalid", reason=reason, votes=tuple(votes))
    winner, count = Counter(vote.winner for vote in valid).most_common(1)[0]
    probabilities = [vote.probability for vote in valid if vote.probability is not None]
    return Verdict(
        winner=winner if count > len(valid) / 2 else "tie",
        probability=fmean(probabilities) if probabilities else None,
        votes=tuple(votes),
    )
