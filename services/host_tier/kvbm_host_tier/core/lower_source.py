"""A lower tier as a source of events: which of its lives the registry names."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_common.tier.follow import Followed, FollowState

from kvbm_host_tier.core.retelling import Said


@dataclass(slots=True, kw_only=True)
class LowerSource(Followed[Said]):
    """A lower tier that is followed, with the life that the registry names."""

    registered_epoch: int = 0
    """The life that the registry names; 0: none. It may have a lower epoch than what the stream
    still has of a life before, because the registry is another one."""

    @property
    def is_unnamed(self) -> bool:
        """Whether the registry names another life than the one that is followed."""
        return self.registered_epoch not in (0, self.epoch)

    def believes(self, epoch: int) -> bool:
        """Tell whether the registry names this life: then it may have a lower epoch."""
        assert epoch >= 0, f"epoch {epoch}"
        return 0 < epoch == self.registered_epoch

    def name_life(self, epoch: int) -> bool:
        """Set the registered life (0: none). Return whether it is current, or already asked for."""
        is_again = self.believes(epoch)
        self.registered_epoch = epoch
        if not is_again and 0 < epoch < self.epoch:
            self.outdate()
        if self.state is FollowState.BEHIND:
            return is_again
        assert self.state is FollowState.CURRENT or not is_again, f"{self}: it is gone, and named"
        return self.state is FollowState.CURRENT and 0 < epoch == self.epoch
