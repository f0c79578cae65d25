"""SGLang's extra keys: hashes that its own tree made (0.5.23), for pages of four tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kvbm_common.identity import ExtraTag, Hasher, request_extras
from kvbm_common.wire.engine_events import BlockStored
from kvbm_connectors.consolidator.core.messages import StreamAttached
from kvbm_connectors.consolidator.core.sglang_keys import unsaid_key

from tests.connectors.consolidator.model import NAMESPACE, Device, Harness, attach

change = msgspec.structs.replace
TOKENS = (0, 1, 2, 3, 4, 5, 6, 7)
PLAIN = (13469532162986437375, 90435953025800507)
TENANT_A = (14843930501434961547, 10193988926448685534)
TENANT_B = (2988670583894738887, 8459371941956450739)
SALTED = (9660377450422254043, 1605981857989356601)
SALTED_DYNAMO = (1493086330068929276, 11278522737111282129)
SALTED_A = (16454166675899259129, 6179503397693338765)
POET = (7062407695916782113, 15126831246100703846)
"""With an adapter, in the format `dynamo`."""


def event(hashes: tuple[int, int], salt: str | None = None, lora: str | None = None) -> BlockStored:
    """What SGLang says of two pages."""
    return BlockStored(
        block_hashes=hashes, token_ids=TOKENS, block_size=4, medium="GPU", cache_salt=salt,
        lora_name=lora,
    )  # fmt: skip


@pytest.mark.parametrize(
    "said",
    [
        event(PLAIN),
        event(SALTED, salt="s"),
        event(SALTED_DYNAMO, salt="s"),
        event(POET, lora="poet"),
        change(event(TENANT_A), parent=5),
        change(event(TENANT_A), token_ids=(-1,) * 8),
        change(event(TENANT_A), block_hashes=(b"12345678",)),
    ],
)
def test_nothing_is_unsaid(said: BlockStored) -> None:
    assert not unsaid_key(said)


@pytest.mark.parametrize(
    "said", [event(TENANT_A), event(SALTED_A, salt="s"), event(SALTED, salt="t"), event(SALTED)]
)
def test_a_key_is_seen_in_the_hash(said: BlockStored) -> None:
    (first, _) = said.block_hashes
    assert isinstance(first, int)
    assert unsaid_key(said) == f"sglang:{first:016x}"


SGLANGS = change(NAMESPACE, block_tokens=4)
HASHER = Hasher(SGLANGS)


def attached(*, shows_extra_keys: bool) -> Harness:
    """One stream, whose hashes show extra keys or are the engine's own."""
    harness = Harness()
    how = change(attach(), namespace=SGLANGS, shows_extra_keys=shows_extra_keys)
    harness.send(StreamAttached(how, b"peer0"))
    harness.grant()
    harness.answer(Device())
    return harness


@pytest.fixture
def sglang() -> Harness:
    """A stream of SGLang's."""
    return attached(shows_extra_keys=True)


def test_two_tenants_share_no_name(sglang: Harness) -> None:
    """Tenants have the same tokens and blocks of their own; a later page follows its first."""
    keys = [f"sglang:{hashes[0]:016x}" for hashes in (TENANT_A, TENANT_B)]
    chains = [HASHER.chain(TOKENS, extras={0: [(ExtraTag.OTHER, key.encode())]}) for key in keys]
    tail = change(
        event(TENANT_B), block_hashes=TENANT_B[1:], parent=TENANT_B[0], token_ids=TOKENS[4:]
    )
    head = change(event(TENANT_B), block_hashes=TENANT_B[:1], token_ids=TOKENS[:4])
    sglang.batch(0, event(PLAIN), event(TENANT_A))
    sglang.batch(1, head)
    sglang.batch(2, tail)
    assert sglang.live[0] == {*HASHER.chain(TOKENS), *chains[0], *chains[1]}
    assert sglang.core.statistics().drops["extra_key"] == 3


KEY_A, SALTED_KEY_A = f"sglang:{TENANT_A[0]:016x}", f"sglang:{SALTED_A[0]:016x}"


@pytest.mark.parametrize(
    ("hashes", "salt", "keys", "namespace"),
    [
        (PLAIN, None, None, None),
        (SALTED_DYNAMO, "s", ("s",), "s"),
        (TENANT_A, None, (KEY_A,), KEY_A),
        (SALTED_A, "s", ("s", SALTED_KEY_A), f"s|{SALTED_KEY_A}"),
    ],
)
def test_routers_get_salt_and_key(
    sglang: Harness, hashes: tuple[int, int], salt: str | None, keys: Any, namespace: str | None
) -> None:
    """Readers that follow vLLM's example find them in the first block's extra keys, and Dynamo's,
    as those of SGLang's own events, in the salt of each event. A later one says no key itself."""
    head = change(event(hashes, salt), block_hashes=hashes[:1], token_ids=TOKENS[:4])
    sglang.batch(0, head)
    sglang.batch(1, change(head, block_hashes=hashes[1:], parent=hashes[0], token_ids=TOKENS[4:]))
    events = [stored for frame in sglang.whole.router.replay(0, 1)
              for stored in msgspec.msgpack.decode(frame.payload)[1]]  # fmt: skip
    found = [stored for stored in events if stored["type"] == "BlockStored"]
    assert sum(len(stored["block_hashes"]) for stored in found) == 2
    assert (found[0].get("extra_keys") or [None])[0] == (list(keys) if keys else None)
    assert {namespace_of_dynamo(stored) for stored in found} == {namespace}


def namespace_of_dynamo(stored: dict[str, Any]) -> str | None:
    """What Dynamo's router takes for the salt of an event's blocks: the field of that name, or a
    key of the first block that begins with its own tag."""
    tagged = [key for key in (stored.get("extra_keys") or [None])[0] or ()
              if isinstance(key, str) and key.startswith("dynamo-cache-salt:")]  # fmt: skip
    return stored.get("cache_salt") or (tagged[0].split(":", 1)[1] if tagged else None)


def test_a_salt_is_no_key(sglang: Harness) -> None:
    sglang.batch(0, event(SALTED_DYNAMO, salt="s"))
    assert sglang.live[0] == set(HASHER.chain(TOKENS, extras=request_extras(salt="s")))
    assert "extra_key" not in sglang.core.statistics().drops


def test_other_engines_hash_as_they_like() -> None:
    """vLLM's hashes are its own, and so are those of an SGLang that is not known."""
    harness = attached(shows_extra_keys=False)
    harness.batch(0, event(TENANT_A))
    assert harness.live[0] == set(HASHER.chain(TOKENS))
