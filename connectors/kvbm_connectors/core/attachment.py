"""The connector's attachment to its host tier: which life of it serves, and until when.

The table is drawn in `docs/state_machines.md`. While the connector is LEAVING it asks and offers
nothing more, and what is under way ends as usual; at the deadline the rest is given up.
"""

from __future__ import annotations

from enum import Enum

from kvbm_common.tier.machine import Machine


class AttachmentState(Enum):
    """The states of an attachment."""

    DETACHED = "detached"
    ATTACHED = "attached"
    LEAVING = "leaving"
    OVERDUE = "overdue"


ATTACHMENT = Machine(
    "connector's attachment",
    {
        (AttachmentState.DETACHED, "welcomed"): AttachmentState.ATTACHED,
        (AttachmentState.DETACHED, "moved"): AttachmentState.DETACHED,
        (AttachmentState.DETACHED, "lost"): AttachmentState.DETACHED,
        (AttachmentState.ATTACHED, "welcomed"): AttachmentState.ATTACHED,
        (AttachmentState.ATTACHED, "moved"): AttachmentState.LEAVING,
        (AttachmentState.ATTACHED, "lost"): AttachmentState.DETACHED,
        (AttachmentState.LEAVING, "welcomed"): AttachmentState.ATTACHED,
        (AttachmentState.LEAVING, "moved"): AttachmentState.LEAVING,
        (AttachmentState.LEAVING, "out of time"): AttachmentState.OVERDUE,
        (AttachmentState.LEAVING, "lost"): AttachmentState.DETACHED,
        (AttachmentState.OVERDUE, "welcomed"): AttachmentState.ATTACHED,
        (AttachmentState.OVERDUE, "moved"): AttachmentState.LEAVING,
        (AttachmentState.OVERDUE, "lost"): AttachmentState.DETACHED,
    },
)


class Attachment:
    """The life of the host tier that serves this connector. Only the core changes it."""

    def __init__(self) -> None:
        self.state = AttachmentState.DETACHED
        self.epoch = 0
        """The life that is attached; 0: none, so that everything passes through."""
        self.explains = False
        """The host tier explains misses, and wants a report of those that it cannot see."""
        self.takes_hints = False
        """The host tier takes what agents say of their sessions."""
        self._arena_epoch = 0
        """The life whose arena is known, even while it does not answer."""
        self._leave_by_ms = 0

    @property
    def refusal(self) -> str:
        """Return why nothing new may begin; empty where it may."""
        if self.state is AttachmentState.ATTACHED:
            return ""
        return "no_host_tier" if self.state is AttachmentState.DETACHED else "moving"

    def welcomed(self, epoch: int, *, explains: bool, hints: bool = False) -> bool:
        """Serve by this life from now on; returns whether its arena is another one."""
        self._move("welcomed" if epoch else "lost")
        is_other_arena = epoch != self._arena_epoch
        self.epoch = self._arena_epoch = epoch
        self.explains, self.takes_hints = explains, hints
        return is_other_arena

    def moved(self, leave_by_ms: int) -> None:
        """Begin to leave: another host tier serves this engine."""
        assert leave_by_ms >= 0, leave_by_ms
        self._move("moved")
        self._leave_by_ms = leave_by_ms

    def lost(self) -> None:
        """Detach: the host tier does not answer."""
        self._move("lost")
        self.epoch = 0

    def is_out_of_time(self, now_ms: int) -> bool:
        """Tell once, at its deadline, that leaving takes too long."""
        if self.state is not AttachmentState.LEAVING or now_ms < self._leave_by_ms:
            return False
        self._move("out of time")
        assert self.epoch, "nothing is left"
        return True

    def _move(self, event: str) -> None:
        self.state = ATTACHMENT.next(self.state, event, f"epoch {self.epoch}")

    def check(self) -> None:
        """Assert that an epoch is known exactly while something is attached."""
        assert (self.epoch == 0) == (self.state is AttachmentState.DETACHED)
