"""Former lives: refused, pardoned all at once, bounded."""

from __future__ import annotations

from kvbm_host_tier.core.former_lives import FORMER_LIVES_MAX, FormerLives
from kvbm_host_tier.core.messages import EngineId

ADA, BOB = EngineId("ada", "1"), EngineId("bob", "1")


def test_all_lives_of_an_engine_are_pardoned_at_once() -> None:
    """Another engine whose name begins so stays out."""
    former, adam = FormerLives(), EngineId("adam", "1")
    for life in (ADA, EngineId("ada", "2"), adam, BOB):
        former.add(life)
    former.pardon("ada")
    assert [life in former for life in (ADA, EngineId("ada", "2"), adam, BOB)] == [
        False, False, True, True,
    ]  # fmt: skip


def test_the_oldest_life_is_forgotten_first() -> None:
    """A crash loop fills no memory."""
    former = FormerLives()
    former.add(ADA)
    for number in range(FORMER_LIVES_MAX - 1):
        former.add(EngineId("bob", str(number)))
    assert ADA in former
    former.add(EngineId("eve", "1"))
    assert ADA not in former
