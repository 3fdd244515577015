"""Turns on the memory of devices that a learner and the servers of engines share."""

from __future__ import annotations

from collections.abc import Callable


def _alone() -> None:
    """The meeting of a run of one process."""


class DeviceTurns:
    """Whose turn it is on the devices of this process; all its nodes share the object.

    The learner's turn begins before it loads its model, and before each of its iterations: all engines give their
    memory back, then all ranks meet, because the servers of a leader run on the GPUs of its replica's other ranks too.
    It ends with the next iteration, after a checkpoint was written: the learner moves what only learning needs to the
    CPU, and all ranks meet again. Engines take their memory when they load the next weights.

    Args:
        shared: whether any engine shares the learner's devices; if not, nothing happens.
        meet: waits for all ranks.

    Attributes:
        learning: whether it is the learner's turn; servers must not start then.
    """

    def __init__(self, shared: bool = False, meet: Callable[[], None] = _alone) -> None:
        self.shared = shared
        self.learning = False
        self._meet = meet
        self._engines: list[Callable[[], None]] = []
        self._learners: list[tuple[Callable[[], None], Callable[[], None]]] = []

    def add_engine(self, give_back: Callable[[], None]) -> None:
        """Has `give_back` called when the learner's turn begins; it does nothing for an engine that holds nothing."""
        self._engines.append(give_back)

    def add_learner(self, offload: Callable[[], None], onload: Callable[[], None]) -> None:
        """Has `offload` called when the learner's turn ends, and `onload` when it begins."""
        self._learners.append((offload, onload))

    def begin(self) -> None:
        """Begins the learner's turn; all ranks call it."""
        if self.shared and not self.learning:
            for give_back in self._engines:
                give_back()
            self._meet()
            self.learning = True
            self.recall()

    def end(self) -> None:
        """Ends the learner's turn; all ranks call it."""
        if self.shared and self.learning:
            for offload, _ in self._learners:
                offload()
            self._meet()
            self.learning = False

    def recall(self) -> None:
        """Has learners take back what they have moved, for a checkpoint outside of their turn."""
        for _, onload in self._learners:
            onload()
