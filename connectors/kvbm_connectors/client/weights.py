"""Weights: a name for those that lie in a directory or file, by their content.

Weights that were replaced must not find the old ones' blocks, and copies of the same weights on
two hosts should share theirs. So the name depends on nothing but relative paths, sizes and bytes:

    file of at most 4 MiB     all bytes: config.json, an index, a small adapter
    *.safetensors             the header in full (names, types, shapes), and pages of every tensor
    any other file            the first and last page, and pages of every 16 MiB

A page has 4 KiB. The positions of pages are drawn from a hash of the file's size, one per stretch
of equal length, the first and the last page of every tensor among them; 4,096 pages are shared out
between all tensors, at most 64 and at least four for each, however many tensors there are. A small
tensor is read whole. The kernel is asked for all pages of a file before the first is waited for.

What is seen for certain: every change of a name, size, shape or type; every change of a small file
or tensor; every change that touches each page of some tensor, as training, merging an adapter or
quantising again does, if only in one tensor; and every change of a run of bytes as long as two
stretches: a seventh of a tensor in a model of 291 tensors, half of one in a model of more than
1,024. What may be missed: an edit of single rows of a large tensor (the embeddings of a few
tokens), or of a shorter run. Weights that are edited so belong under another path with another
config.json, or with a `revision` in the connector's options.

A model of 5,000 tensors takes 0.3 s from the page cache and 0.7 s from a disk. Hashing every byte
takes as long as reading them: a minute for 140 GB from a disk of 2 GB/s.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kvbm_common.errors import KvbmError

SUFFIXES = frozenset({
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".npz", ".npy", ".tensors",
    ".json", ".yaml", ".py",
})  # fmt: skip
"""Weights, what describes them, and modelling code that comes with them."""
WEIGHTS = SUFFIXES - {".json", ".yaml", ".py"}
NOT_OF_THE_MODEL = frozenset({
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "added_tokens.json",
    "special_tokens_map.json", "chat_template.json", "tekken.json",
})  # fmt: skip
"""Files that say what tokens mean: a block is named by its token ids. `generation_config.json`
counts: Llama 4 takes the tuning of its attention from it."""
FILES_MAX = 10_000
PAGE_BYTES = 4096
WHOLE_BYTES = 4 << 20
STRETCH_BYTES = 16 << 20
"""The stretch with one page, in files without a header that says where tensors are."""
PAGES = 4096
"""Pages of all tensors together, unless there are so many that each has PAGES_MIN."""
PAGES_MIN = 4
PAGES_MAX = 64
"""Pages of one tensor at most."""
HEADER_BYTES_MAX = 100 << 20
"""safetensors' own limit."""
SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
"""A directory of the Hugging Face hub's cache."""

Span = tuple[int, int]
"""First byte and end of a part of a file."""
Plan = tuple[int, Sequence[Span]]
"""The reads of a file: all bytes before the first number, and pages of each span."""

LINKS_MAX = 40
"""Links on the way to a file, as Linux follows at most."""


class Look(Enum):
    """The thing that a signature looks at: a path's target, a link itself, or a directory that a
    link leads into. The last has a time, and may get further files."""

    TARGET = "target"
    LINK = "link"
    HOLDER = "holder"


Place = tuple[str, Look]
Signature = Mapping[Place, tuple[int, ...]]
"""Values of each place: some change when a path is touched, or another file takes its place."""


class UnreadableWeights(KvbmError):
    """The content of weights is unknown, so that blocks computed with them have no name."""

    code = "unreadable_weights"


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the model: its place below the directory, and where it is now."""

    name: str
    path: Path
    size: int


def resolve(model: str, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """Return where the weights of a model are on this host: its path, or a snapshot of the hub.

    Nothing is loaded: the engine has done that. Raises UnreadableWeights when nothing is there.
    """
    path = Path(model)
    if path.exists():
        return path
    try:
        hub = importlib.import_module("huggingface_hub")  # Engines have it, services do not.
        found = hub.snapshot_download(
            model, revision=revision or None, cache_dir=cache_dir, local_files_only=True
        )
    except Exception as error:  # Of many types; some come from a hub that is not installed.
        text = f"{model} is neither a path nor a model in the hub's cache: {error!r}"
        raise UnreadableWeights(text) from error
    return Path(found)


def label_of(model: str) -> str:
    """Return what to call a model: its hub id, or the last part of its path.

    Where it lies says nothing of what it is: hosts may keep the same weights in different places.

    >>> label_of("/data/hub/models--org--tiny/snapshots/" + 40 * "0"), label_of("/srv/tiny/")
    ('org/tiny', 'tiny')
    """
    found = SNAPSHOT.search(model)
    if found is not None:
        return found["name"].replace("--", "/")
    return Path(model).name if Path(model).exists() and Path(model).name else model


def fingerprint(path: Path) -> str:
    """Return the digest of the weights in a directory, or of one file; see the module.

    A commit of the hub is no name: a file that is written through its link, as `cp` does it, keeps
    the snapshot's name. Raises UnreadableWeights when a file cannot be read, or there are no
    weights.
    """
    files = _files(path)
    if not any(Path(one.name).suffix in WEIGHTS for one in files):
        raise UnreadableWeights(f"{path} has no weights")
    digest = hashlib.blake2b(digest_size=16)
    try:
        plans = [_plan(one) for one in files]
        count = sum(len(spans) for _, spans in plans)
        pages = max(PAGES_MIN, min(PAGES_MAX, PAGES // max(1, count)))
        for one, plan in zip(files, plans, strict=True):
            name = one.name.encode()
            digest.update(b"%d:%s:%d:" % (len(name), name, one.size))
            digest.update(_content(one, plan, pages))
    except OSError as error:
        raise UnreadableWeights(f"{path} cannot be read: {error}") from error
    return digest.hexdigest()


def content_of(path: Path | str) -> str:
    """Return the digest of all bytes of a small file. Raises UnreadableWeights."""
    try:
        with open(path, "rb") as file:
            content = file.read(WHOLE_BYTES + 1)
    except OSError as error:
        raise UnreadableWeights(f"{path} cannot be read: {error}") from error
    if len(content) > WHOLE_BYTES:
        raise UnreadableWeights(f"{path} has more than {WHOLE_BYTES} bytes")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def signature(path: Path) -> Signature:
    """Return what changes when a file was touched: cheap, and no name for its content.

    A link that is moved leads to other files, which may be old: each one that is followed counts.
    So does each directory that holds a file, or a link to it: one that is renamed has a new time,
    its files have none. Raises UnreadableWeights.
    """
    files = {one.path for one in _files(path)}
    inside = {path} | {one.parent for one in files - {path}}
    try:
        places = {place for one in files for place in _followed(one)}
        places |= {(str(one), Look.TARGET) for one in files | inside}
        # A directory that is swapped before its file is looked at is young when its turn comes.
        ordered = sorted(places, key=lambda place: place[1] is Look.HOLDER)
        return {place: _stamp(*place) for place in ordered}
    except OSError as error:
        raise UnreadableWeights(f"{path} cannot be read: {error}") from error


def choice_of(snapshot: Path) -> Signature:
    """Return a signature of the hub cache's `refs/main`, which changes with the chosen snapshot.

    Raises UnreadableWeights.
    """
    reference = snapshot.parent.parent / "refs" / "main"
    try:
        return {(str(reference), Look.TARGET): _stamp(str(reference), Look.TARGET)}
    except OSError as error:
        raise UnreadableWeights(f"{reference} cannot be read: {error}") from error


def is_unchanged(before: Signature) -> bool:
    """Return whether no file of a signature was touched, and none came or went beside them.

    Where links lead, other files may come and go: those that the links name are compared.
    """
    compared = {place: stamp for place, stamp in before.items() if place[1] is not Look.HOLDER}
    try:
        return all(_stamp(*place) == stamp for place, stamp in compared.items())
    except OSError:
        return False


def changed_ns(found: Signature) -> int:
    """Return when a file, directory or link of a signature was last changed or renamed, on its file
    system's wall clock."""
    return max((stamp[3] for stamp in found.values()), default=0)


def _stamp(path: str, look: Look) -> tuple[int, ...]:
    found = os.stat(path, follow_symlinks=look is not Look.LINK)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _followed(path: Path) -> Iterator[Place]:
    """Yield each link that is followed on the way to a file, and each directory behind a link that
    holds the file or a further link to it. Raises OSError."""
    parts = [*reversed((Path.cwd() / path).parts)]
    at, count = "", 0
    while parts:
        part = parts.pop()
        step = os.path.join(at, part)  # An absolute part replaces what was before.
        if count and not parts:
            yield at, Look.HOLDER
        if not _is_link(step):
            at = step  # With `..` as it is: behind `/proc/PID/root` the kernel alone knows its way.
        elif (count := count + 1) > LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        else:
            yield step, Look.LINK
            parts.extend(reversed(Path(os.readlink(step)).parts))


def _is_link(path: str) -> bool:
    """Tell whether a path is a link that says where it leads, and keeps the time when it was made.

    The kernel's links in `/proc` do neither. `/proc/PID/root` says `/` and leads into the files of
    another container; its time is when it was looked at. Raises OSError.
    """
    found = os.lstat(path)
    return stat.S_ISLNK(found.st_mode) and found.st_dev != os.stat("/proc/self").st_dev


def _files(path: Path) -> list[_File]:
    """Return the files that the weights consist of, sorted by name. Raises UnreadableWeights."""
    try:
        if path.is_file():
            return [_File(f"model{path.suffix}", path, path.stat().st_size)]
        found = sorted(_walk(path, path, frozenset()), key=lambda one: one.name)
    except OSError as error:
        raise UnreadableWeights(f"{path} cannot be read: {error}") from error
    if len(found) > FILES_MAX:
        raise UnreadableWeights(f"{path} has more than {FILES_MAX} files")
    return found


def _walk(root: Path, directory: Path, above: frozenset[str]) -> Iterator[_File]:
    """Yield the model's files below a directory; follow links, but not into a directory above."""
    real = os.path.realpath(directory)
    with os.scandir(directory) as listing:
        entries = list(listing)
    for entry in entries:
        if entry.name.startswith(".") or real in above:
            continue
        path = Path(entry.path)
        if entry.is_dir():
            yield from _walk(root, path, above | {real})
        elif path.suffix in SUFFIXES and entry.name not in NOT_OF_THE_MODEL:
            found = path.stat()
            if stat.S_ISREG(found.st_mode):
                yield _File(path.relative_to(root).as_posix(), path, found.st_size)


def _plan(file: _File) -> Plan:
    """Return what to read of a file: all of a small one, else its tensors, or stretches of it if
    the tensors are unknown."""
    if file.size <= WHOLE_BYTES:
        return file.size, ()
    with file.path.open("rb") as opened:
        found = _tensors(opened.fileno(), file.size)
    stretches = range(0, file.size, STRETCH_BYTES)
    return found or (0, [(one, min(one + STRETCH_BYTES, file.size)) for one in stretches])


def _tensors(file: int, size: int) -> Plan | None:
    """Return the end of the header and the spans of the tensors of a safetensors file; None for a
    file of another kind."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    end = 8 + length
    if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8) or os.pread(file, 1, 8) != b"{":
        return None
    try:
        header = json.loads(_read(file, 8, end))
        header.pop("__metadata__", None)
        offsets = [tensor["data_offsets"] for tensor in header.values()]
        spans = sorted((end + int(first), end + int(after)) for first, after in offsets)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    known = all(end <= first <= after <= size for first, after in spans)
    return (end, spans) if known and spans else None


def _content(file: _File, plan: Plan, pages: int) -> bytes:
    """Return a digest of what is read of a file: its beginning, and at most `pages` pages per
    span."""
    digest = hashlib.blake2b(digest_size=16)
    before, spans = plan
    draws = hashlib.shake_128(b"kvbm-weights:%d" % file.size).digest(8 * pages)
    with file.path.open("rb") as opened:
        wanted = [page for span in spans for page in _pages(span, pages, draws)]
        _announce(opened.fileno(), wanted)
        digest.update(_read(opened.fileno(), 0, before))
        for first, end in wanted:
            digest.update(_read(opened.fileno(), first, end))
    return digest.digest()


def _announce(file: int, wanted: Sequence[Span]) -> None:
    """Let the kernel read pages at the same time: one after the other took five times as long."""
    with contextlib.suppress(OSError):  # A hint, which not every file system takes.
        for first, end in wanted:
            os.posix_fadvise(file, first, end - first, os.POSIX_FADV_WILLNEED)


def _pages(span: Span, count: int, draws: bytes) -> Iterator[Span]:
    """Yield pages of one tensor: one in each stretch; the first and last are its first and last
    page."""
    first, end = span
    if end - first <= count * PAGE_BYTES:
        yield span
        return
    yield first, first + PAGE_BYTES
    yield end - PAGE_BYTES, end
    for index in range(1, count - 1):
        start = first + (end - first) * index // count
        room = (end - first) // count - PAGE_BYTES
        drawn = int.from_bytes(draws[8 * index : 8 * index + 8], "little")
        start += drawn % room if room > 0 else 0
        yield start, start + PAGE_BYTES


def _read(file: int, first: int, end: int) -> bytes:
    """Read the bytes of a file from `first` to `end`; raises OSError when it has become shorter."""
    pieces: list[bytes] = []
    while first < end:
        piece = os.pread(file, end - first, first)
        if not piece:
            raise OSError("the file has become shorter")
        pieces.append(piece)
        first += len(piece)
    return b"".join(pieces)
