"""Compute the champion and the previous champion from a history of decisions."""

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
        """Version that is champion; None if there is no champion."""
        return self._top(1)

    @property
    def previous(self) -> int | None:
        """Version that a rollback would make champion; None if there is no such version."""
        return self._top(2)

    def decided(self, key: str, version: int) -> Decision | None:
        """Return the decision with this key and version; None if there is no such decision."""
        made = [each for each in self.decisions if (each.key, each.version) == (key, version)]
        return made[0] if made else None

    def _top(self, depth: int) -> int | None:
        stack = stack_of(self.decisions)
        return stack[-depth] if len(stack) >= depth else None


def stack_of(decisions: Sequence[Decision]) -> tuple[int, ...]:
    """Return the stack of champions after the decisions; the present champion is the last item.

    A promotion pushes its version, unless the version is already on top. A move of the alias that
    was found in MLflow does the same. A rollback pops the top version. A refusal changes nothing.
    If the alias was deleted in MLflow, the stack becomes empty.
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
