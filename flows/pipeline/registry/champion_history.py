"""Who is champion by a history of decisions."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.registry.decisions import Decision


@dataclass(frozen=True)
class Champions:
    """The champion and the one before, as the decisions leave them."""

    decisions: tuple[Decision, ...] = ()
    """All of them, the oldest first."""

    @property
    def champion(self) -> int | None:
        """The version that is champion; None if there is none."""
        return self._top(1)

    @property
    def previous(self) -> int | None:
        """The version that a rollback would bring back; None if there is none."""
        return self._top(2)

    def decided(self, key: str, version: int) -> Decision | None:
        """What the attempt `key` decided about a version; None if it has not decided."""
        made = [each for each in self.decisions if (each.key, each.version) == (key, version)]
        return made[0] if made else None

    def _top(self, depth: int) -> int | None:
        stack = stack_of(self.decisions)
        return stack[-depth] if len(stack) >= depth else None


def stack_of(decisions: Sequence[Decision]) -> tuple[int, ...]:
    """The champions that decisions leave, one upon the other, the present one last.

    A promotion, or a version that was found, goes on top, unless it is there already. A rollback
    takes the top away, a refusal changes nothing. An alias that was found deleted empties it.
    """
    stack: tuple[int, ...] = ()
    for decision in decisions:
        if decision.action == "refused":
            continue
        if decision.action == "rolled back":
            stack = stack[:-1]
        elif decision.champion is None:
            stack = ()
        elif stack[-1:] != (decision.version,):
            stack = (*stack, decision.version)
    return stack
