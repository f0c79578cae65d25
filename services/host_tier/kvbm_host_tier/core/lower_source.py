"""A lower tier as a followed source, and which of its lives the registry names."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.tier.follow import Followed, FollowState

from kvbm_host_tier.core.replay import BlockChange


@dataclass(slots=True, kw_only=True)
class LowerSource(Followed[BlockChange]):
    """A lower tier that is followed."""

    @property
    def is_replaced(self) -> bool:
        """Tell whether the registry names another life than the one that is followed."""
        return self.registered_epoch not in (0, self.epoch)

    def register(self, epoch: int) -> bool:
        """Set the registered life (0: none). Return whether it is current, or already asked for."""
        is_again = self.is_registered_epoch(epoch)
        self.registered_epoch = epoch
        if not is_again and 0 < epoch < self.epoch:
            self.mark_snapshot_stale()
        if self.state is FollowState.BEHIND:
            return is_again
        is_current = self.state is FollowState.CURRENT
        assert is_current or not is_again, f"{self}: it is gone, and registered"
        return is_current and 0 < epoch == self.epoch
