"""SGLang's extra keys: hashes that its own tree made (0.5.23), for pages of four tokens."""

from __future__ import annotations

import msgspec
import pytest
from kvbm_common.identity import ExtraTag, Hasher, Namespace, request_extras
from kvbm_common.wire.engine_events import BlockStored, decode_batch
from kvbm_connectors.consolidator.core.messages import StreamAttached
from kvbm_connectors.consolidator.core.sglang_keys import LAYOUT, unsaid_key
from kvbm_connectors.sglang.pages import KV, namespace_of, regions_of

from tests.connectors.consolidator.model import NAMESPACE, Device, Harness, attach
from tests.connectors.sglang.pool import Config, Pool

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
        msgspec.structs.replace(event(TENANT_A), parent=5),
        msgspec.structs.replace(event(TENANT_A), token_ids=(-1,) * 8),
        msgspec.structs.replace(event(TENANT_A), block_hashes=(b"12345678",)),
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


SGLANGS = msgspec.structs.replace(NAMESPACE, block_tokens=4, layout=f"{LAYOUT}kv")
HASHER = Hasher(SGLANGS)


def attached(namespace: Namespace) -> Harness:
    """One stream whose blocks have names in this namespace."""
    harness = Harness()
    harness.send(StreamAttached(msgspec.structs.replace(attach(), namespace=namespace), b"peer0"))
    harness.grant()
    harness.answer(Device())
    return harness


@pytest.fixture
def sglang() -> Harness:
    """A stream of SGLang's."""
    return attached(SGLANGS)


def test_two_tenants_share_no_name(sglang: Harness) -> None:
    """Tenants have the same tokens and blocks of their own; a later page follows its first."""
    keys = [f"sglang:{hashes[0]:016x}" for hashes in (TENANT_A, TENANT_B)]
    chains = [HASHER.chain(TOKENS, extras={0: [(ExtraTag.OTHER, key.encode())]}) for key in keys]
    tail = msgspec.structs.replace(
        event(TENANT_B), block_hashes=TENANT_B[1:], parent=TENANT_B[0], token_ids=TOKENS[4:]
    )
    head = msgspec.structs.replace(event(TENANT_B), block_hashes=TENANT_B[:1], token_ids=TOKENS[:4])
    sglang.batch(0, event(PLAIN), event(TENANT_A))
    sglang.batch(1, head)
    sglang.batch(2, tail)
    assert sglang.live[0] == {*HASHER.chain(TOKENS), *chains[0], *chains[1]}
    assert sglang.core.statistics().drops["extra_key"] == 3


def test_routers_get_salt_and_key(sglang: Harness) -> None:
    """As vLLM says a salt: in the first block's extra keys."""
    sglang.batch(0, event(SALTED_A, salt="s"))
    (frame,) = sglang.whole.router.replay(0, 1)
    (stored,) = decode_batch(frame.payload).events
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == (("s", f"sglang:{SALTED_A[0]:016x}"), None)


def test_a_salt_is_no_key(sglang: Harness) -> None:
    sglang.batch(0, event(SALTED_DYNAMO, salt="s"))
    assert sglang.live[0] == set(HASHER.chain(TOKENS, extras=request_extras(salt="s")))
    assert "extra_key" not in sglang.core.statistics().drops


def test_other_engines_hash_as_they_like() -> None:
    """vLLM's hashes are its own."""
    namespace = msgspec.structs.replace(NAMESPACE, block_tokens=4)
    harness = attached(namespace)
    harness.batch(0, event(TENANT_A))
    assert harness.live[0] == set(Hasher(namespace).chain(TOKENS))


def test_the_back_end_s_layouts_begin_so() -> None:
    pool = Pool()
    assert namespace_of(Config(), KV, pool, regions_of(pool)).layout.startswith(LAYOUT)
