"""Epochs from the future are refused, those of a clock that is a little ahead are not."""

from __future__ import annotations

import pytest
from kvbm_common.wire.codec import WireError
from kvbm_common.wire.epochs import AHEAD_MAX_S, epoch_max, require_epoch

NOW_S = 1_800_000_000.0


def test_a_day_ahead_is_the_limit() -> None:
    most = epoch_max(NOW_S)
    assert most == int(NOW_S + AHEAD_MAX_S) * 1_000_000
    require_epoch(most, NOW_S)
    with pytest.raises(WireError, match="a day ahead") as caught:
        require_epoch(most + 1, NOW_S)
    assert caught.value.kind == "future_epoch"
