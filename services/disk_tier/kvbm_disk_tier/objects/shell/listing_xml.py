"""The XML of a listing, read at once: botocore takes ten times as long, and holds up the loop.

botocore asks its handlers before it reads an answer. This one takes the listing out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

ROOT = "ListBucketResult"
EVENT = "before-parse.s3.ListObjectsV2"
READ = "KvbmListing"
"""The key of what was read in botocore's answer."""


@dataclass(frozen=True, slots=True)
class ReadListing:
    """The content of an answer to a list. Without `is_truncated` (None) it is no listing."""

    prefix: str | None = None
    is_truncated: bool | None = None
    names: Sequence[str] = ()
    sizes: Sequence[int] = ()
    stored_ms: Sequence[int] = ()
    folders: Sequence[str] = ()


def before_parse(
    *, response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: object
) -> None:
    """Read a listing, and leave nothing of it; errors are botocore's."""
    if response_dict["status_code"] == 200:
        customized_response_dict[READ] = read_listing(response_dict["body"])
        response_dict["body"] = b""


def read_listing(body: bytes) -> ReadListing:
    """Return what a listing says; what makes no sense raises KeyError, ValueError or ParseError."""
    if not body:
        return ReadListing()
    root = ElementTree.fromstring(body)
    if not root.tag.endswith(ROOT):
        return ReadListing()
    space = root.tag.removesuffix(ROOT)
    top = {child.tag.removeprefix(space): child.text or "" for child in root}
    is_encoded = top.get("EncodingType") == "url"
    names: list[str] = []
    sizes: list[int] = []
    stored_ms: list[int] = []
    key_tag, size_tag, stored_tag = f"{space}Key", f"{space}Size", f"{space}LastModified"
    for entry in root.iterfind(f"{space}Contents"):
        found = {child.tag: child.text or "" for child in entry}
        name = found[key_tag]
        names.append(unquote(name) if is_encoded and "%" in name else name)
        sizes.append(int(found[size_tag]))
        stored_ms.append(round(1000 * datetime.fromisoformat(found[stored_tag]).timestamp()))
    paths = [one.text or "" for one in root.iterfind(f"{space}CommonPrefixes/{space}Prefix")]
    decoded = unquote if is_encoded else str
    prefix = top.get("Prefix")
    truncated = top.get("IsTruncated")
    return ReadListing(
        prefix=None if prefix is None else decoded(prefix),
        is_truncated=None if truncated is None else truncated.lower() == "true",
        names=names,
        sizes=sizes,
        stored_ms=stored_ms,
        folders=[decoded(path) for path in paths],
    )
