"""With this directory on PYTHONPATH every Python process finds a GPU: the shared fake.

Python imports it before anything else. What it puts in CupyRuntime's place makes the fake when it
is asked for, because most processes never ask.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbm_common.cuda import runtime

if TYPE_CHECKING:
    from tests.gpu.shared_runtime import SharedRuntime


class Everywhere:
    """Stands for CupyRuntime."""

    def __new__(cls, device: int = 0) -> SharedRuntime:  # type: ignore[misc]
        from tests.gpu.shared_runtime import SharedRuntime

        assert device == 0
        return SharedRuntime()

    @classmethod
    def at(cls, bus_id: str) -> SharedRuntime:
        """The only one there is."""
        return cls()


runtime.CupyRuntime = Everywhere  # type: ignore[misc, assignment]
