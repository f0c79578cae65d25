"""Looks at the requests of one engine: in which step each is looked at next.

Decoded blocks of a request wait for others of it, and looks at many requests are taken in turn.
Where a step has the block tables of few requests, each is looked at in a step that has its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_connectors.vllm.calendar import Calendar
from kvbm_connectors.vllm.kv_groups import KvGroup, decoded_together
from kvbm_connectors.vllm.tracked import DECODED_BLOCKS, Tracked


class Looks(Calendar):
    """Calendar that asks each request when it is to be looked at again."""

    def __init__(
        self, groups: Sequence[KvGroup], block_tokens: int, *, windows: bool, all_tables: bool
    ) -> None:
        """Look at requests whose blocks end at multiples of `block_tokens`.

        With `windows` blocks may leave their table. Without `all_tables` a step has the tables of
        those requests only that begin a block in it.
        """
        together = decoded_together(groups, block_tokens, DECODED_BLOCKS)
        most = decoded_together(groups, block_tokens, 2 * DECODED_BLOCKS)
        waits = (most - together) * block_tokens if all_tables else 0
        super().__init__(2 * block_tokens, waits)
        self._block_tokens, self._together = block_tokens, together
        self._windows, self._all_tables = windows, all_tables

    def look_again(self, request: str, tracked: Tracked) -> None:
        """Have a request looked at when more of it can be offered, or must be held."""
        block_tokens = self._block_tokens
        steps = tracked.steps_to_next_look(block_tokens, self._together, windows=self._windows)
        if not self._all_tables:
            steps = tracked.steps_to_table(steps, block_tokens)
        self.look_in(request, steps, tracked.step_tokens)
