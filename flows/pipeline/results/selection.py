"""Records of the choice between the start and the end of PPO."""

from dataclasses import dataclass, field

from pipeline.judges.judge_budget import Spent


@dataclass(frozen=True, kw_only=True)
class TriedPolicy:
    """Measurements of a candidate, a policy between the start and the end of PPO."""

    weight: float
    """Position of the policy: 0 is the start of PPO, and 1 is the end."""

    kl: float
    """KL divergence of the policy's answers from the start of PPO, in nats per answer."""

    points: float | None = None
    """Mean points against the start of PPO: win 1, tie 0.5, loss 0. None if no judge was asked."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The chosen policy, and the measurements for the choice."""

    weight: float
    """Position of the chosen policy: 0 is the start of PPO, and 1 is the end."""

    limit: float
    """Largest KL divergence of a policy that may be chosen, in nats per answer."""

    prompts: int
    """Number of prompts that were answered."""

    candidates: list[TriedPolicy]
    """Measured policies in the order of the measurements."""

    spent: dict[str, Spent] = field(default_factory=dict)
    """Calls and tokens of the judges, by name."""

    def __str__(self) -> str:
        """Return a sentence for the log and the notes of the evaluation."""
        measured = ", ".join(
            f"{each.weight:.3g}: KL {each.kl:.3g}"
            + ("" if each.points is None else f", points {each.points:.3f}")
            for each in self.candidates
        )
        chosen = next(each for each in self.candidates if each.weight == self.weight)
        if chosen.kl > self.limit:
            why = f"no policy was within a KL of {self.limit:.3g} nats, and it is the nearest"
        elif chosen.points is None:
            why = f"it is the last within a KL of {self.limit:.3g} nats"
        else:
            why = f"the judge preferred it, of those within a KL of {self.limit:.3g} nats"
        return (
            f"The policy at {self.weight:.3g} of the way from SFT to the end of PPO is chosen: "
            f"{why}, on {self.prompts} prompts ({measured})."
        )
