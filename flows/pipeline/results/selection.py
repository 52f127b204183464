"""Records of the choice of a policy of PPO."""

from dataclasses import dataclass, field

from pipeline.judges.judge_budget import Spent


@dataclass(frozen=True, kw_only=True)
class TriedPolicy:
    """Measurements of a candidate for the policy that is evaluated and registered."""

    weight: float
    """Position on the line from the start of PPO, 0, to the end, 1; a position above 1 lies beyond
    the end. A policy that was saved during PPO has the position 1, too."""

    kl: float
    """KL divergence of the policy's answers from the start of PPO, in nats per answer."""

    points: float | None = None
    """Mean points against the start of PPO: win 1, tie 0.5, loss 0. None if no judge was asked."""

    update: int | None = None
    """Update of PPO after which the policy was saved; None if it was not saved before the end."""

    @property
    def name(self) -> str:
        """The position, or the update after which the policy was saved."""
        return f"{self.weight:.3g}" if self.update is None else f"update {self.update}"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The chosen policy, and the measurements for the choice."""

    weight: float
    """Position of the chosen policy, as in `TriedPolicy`."""

    limit: float
    """Largest KL divergence of a policy that may be chosen, in nats per answer."""

    prompts: int
    """Number of prompts that were answered."""

    candidates: list[TriedPolicy]
    """Measured policies, in the order in which they were measured."""

    update: int | None = None
    """Update of PPO after which the chosen policy was saved, as in `TriedPolicy`."""

    spent: dict[str, Spent] = field(default_factory=dict)
    """Calls and tokens of the judges, by name."""

    @property
    def is_end(self) -> bool:
        """Whether the policy at the end of PPO was chosen."""
        return self.weight == 1 and self.update is None

    def __str__(self) -> str:
        """Return a sentence for the log and the notes of the evaluation."""
        measured = ", ".join(
            f"{each.name}: KL {each.kl:.3g}"
            + ("" if each.points is None else f", points {each.points:.3f}")
            for each in self.candidates
        )
        place = (self.weight, self.update)
        chosen = next(each for each in self.candidates if (each.weight, each.update) == place)
        where = f"at position {self.weight:.3g} (0 is SFT, 1 is the end of PPO)"
        if self.update is not None:
            where = f"after update {self.update} of PPO"
        if chosen.kl > self.limit:
            why = f"no policy is within {self.limit:.3g} nats of KL, and it is the nearest"
        elif chosen.points is None:
            why = f"it is the furthest one within {self.limit:.3g} nats of KL"
        else:
            why = f"the judge preferred it among the policies within {self.limit:.3g} nats of KL"
        return (
            f"The policy {where} is chosen: {why}. Measured on {self.prompts} prompts: {measured}."
        )
