"""Naming: which extras the blocks of an engine event have.

vLLM says per block what else it hashed, in this order and without tags: the LoRA name (in every
block), multimodal keys, the cache salt (in the first block of a prompt), a digest of prompt
embeddings. We tag them by these rules:

1. What equals the event's LoRA name (or number), once per block, is the LoRA. It names the first
   block of a prompt, together with the digest of its content where the connector has said one;
   the chain carries it on.
2. In the first block of a prompt the last plain string is the salt.
3. Other plain strings, and pairs (string, offset), are multimodal content.
4. Anything else is OTHER, encoded as msgpack.

vLLM 0.31 and later hash keys with tags, such as ("cache_salt", s). Their events leave the tags out
until consumers know them (`to_event_extra_keys`), which these rules do: a tag is read and dropped.

SGLang says the salt in a field of its own, and no extra key: `sglang_keys.py` sees a key in the
hash of a prompt's first block, which has an OTHER then.

A multimodal prompt of an old vLLM without a salt has a key taken for a salt: it is then named apart
from the connector's own name for it, which costs a hit and can never make a wrong one.
"""

from __future__ import annotations

from typing import Any

import msgspec
from kvbm_common.identity import Extras, ExtraTag
from kvbm_common.wire.engine_events import BlockStored

_encoder = msgspec.msgpack.Encoder()


def extras_of(
    event: BlockStored, *, lora: str | None = None, generation: str = "", unsaid: str = ""
) -> dict[int, Extras]:
    """Return the extras of an event's blocks, by block index.

    `lora` stands for the event's adapter and its content, None: for its name alone. `generation`
    is that of the engine when it stored the blocks. `unsaid` stands for a key that the event does
    not say.

    >>> extras_of(BlockStored(block_hashes=(1,), token_ids=(5,), block_size=1,
    ...                       extra_keys=(("blue",),)))
    {0: [(<ExtraTag.SALT: 2>, b'blue')]}
    """
    extras: dict[int, Extras] = {}
    for index, keys in enumerate(event.extra_keys or ()):
        if keys:
            is_first = index == 0 and event.parent is None
            if found := _tagged([_without_tag(key) for key in keys], event, first=is_first):
                extras[index] = found
    if event.parent is None:
        first = [*extras.get(0, ()), *_of_request(event, lora)]
        if generation:
            first.append((ExtraTag.GENERATION, bytes.fromhex(generation)))
        if unsaid:
            first.append((ExtraTag.OTHER, unsaid.encode()))
        if first:
            extras[0] = first
    assert all(extras.values()), f"a block has extras, and none: {extras}"
    return extras


def _of_request(event: BlockStored, lora: str | None) -> list[tuple[ExtraTag, bytes]]:
    """Return the extras that the event itself names: its adapter and its salt."""
    found = []
    if lora is not None:
        found.append((ExtraTag.LORA, lora.encode()))
    elif event.lora_name:
        found.append((ExtraTag.LORA, event.lora_name.encode()))
    elif event.lora_id is not None:
        found.append((ExtraTag.LORA, b"#%d" % event.lora_id))
    if event.cache_salt:
        found.append((ExtraTag.SALT, event.cache_salt.encode()))
    return found


def _without_tag(key: Any) -> Any:
    """Return a key as events without tags have it.

    >>> _without_tag(("mm", "image", 3)), _without_tag(("lora", "poet", "/adapters/poet"))
    (('image', 3), 'poet')
    """
    match key:
        case ("mm", str(), int()):
            return tuple(key[1:])
        case ("lora", str(name), str()):
            return name
        case ("cache_salt", str(salt)):
            return salt
        case ("prompt_embeds", bytes(digest)):
            return digest
        case _:
            return key


def _tagged(keys: list[Any], event: BlockStored, *, first: bool) -> list[tuple[ExtraTag, bytes]]:
    for lora in (event.lora_name, event.lora_id):
        if lora is not None and lora in keys:
            keys.remove(lora)
            break
    plain = [index for index, key in enumerate(keys) if isinstance(key, str)]
    salt_index = plain[-1] if first and plain and not event.cache_salt else -1
    return [
        _salt(key) if index == salt_index else _content(key)
        for index, key in enumerate(keys)
        if key != ""
    ]


def _salt(key: str) -> tuple[ExtraTag, bytes]:
    return ExtraTag.SALT, key.encode()


def _content(key: Any) -> tuple[ExtraTag, bytes]:
    if isinstance(key, str):
        return ExtraTag.MULTIMODAL, key.encode()
    if isinstance(key, list | tuple) and len(key) == 2 and isinstance(key[0], str):
        return ExtraTag.MULTIMODAL, f"{key[0]}:{key[1]}".encode()
    return ExtraTag.OTHER, _encoder.encode(key)
