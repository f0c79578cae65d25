"""Pass-through: an engine that computes without a cache says so, and why, for its operators.

It has no scheduler half: nothing is looked up, offered or followed. One link attaches it to the
consolidator of its host, and beats; the consolidator lists it with its reason.
"""

from __future__ import annotations

from kvbm_common.wire.consolidator import Attach, Detach, from_consolidator, to_consolidator
from kvbm_common.wire.local import Beat

from kvbm_connectors.client.link import Link
from kvbm_connectors.client.link_thread import LinkThread


class PassThrough:
    """One engine's word to its consolidator. Owns a thread; without a consolidator it waits."""

    def __init__(self, attach: Attach, consolidator_endpoint: str) -> None:
        """Say what `attach` says, whose `passes_through` is the reason."""
        assert attach.passes_through, f"{attach.engine} passes through without a reason"
        assert not attach.endpoint, f"{attach.engine} passes through, and is followed"
        self.reason = attach.passes_through
        self._detach = Detach(engine=attach.engine, incarnation=attach.incarnation)
        self._link = Link(
            f"{attach.engine}: consolidator",
            consolidator_endpoint,
            to_consolidator,
            from_consolidator,
            lambda: attach,
            Beat(engine=attach.engine, incarnation=attach.incarnation),
            lambda message: None,
        )
        self._thread = LinkThread([self._link], name=f"kvbm-{attach.engine}")

    def start(self) -> None:
        """Begin to attach, without a cache."""
        self._thread.start()

    def close(self) -> None:
        """Say good-bye and end the thread."""
        self._thread.say(self._link, self._detach)
        self._thread.close()
