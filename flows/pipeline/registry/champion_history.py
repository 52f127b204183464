"""The champion and the previous champion that follow from a history of decisions."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.registry.decisions import Decision


@dataclass(frozen=True)
class Champions:
    """The champion and the previous champion after a sequence of decisions."""

    decisions: tuple[Decision, ...] = ()
    """All decisions, the oldest first."""

    @property
    def champion(self) -> int | None:
        """The champion; None if there is none."""
        return self._top(1)

    @property
    def previous(self) -> int | None:
        """The version that a rollback would restore; None if there is none."""
        return self._top(2)

    def decided(self, key: str, version: int) -> Decision | None:
        """Return the decision of the attempt `key` on a version; None if there is none."""
        made = [each for each in self.decisions if (each.key, each.version) == (key, version)]
        return made[0] if made else None

    def _top(self, depth: int) -> int | None:
        stack = stack_of(self.decisions)
        return stack[-depth] if len(stack) >= depth else None


def stack_of(decisions: Sequence[Decision]) -> tuple[int, ...]:
    """Return the stack of champions after the decisions, the present champion last.

    A promoted or found version is pushed unless it is on top already. A rollback pops the top, and
    a refusal changes nothing. A deleted alias empties the stack.
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
