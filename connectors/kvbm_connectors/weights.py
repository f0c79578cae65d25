"""Weights: a name for those that lie in a directory, for a namespace's revision."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".json")


def fingerprint(directory: Path) -> str:
    """A name for the weights in a directory: of its files, their sizes and times of change.

    Weights that were replaced in place must not find the old ones' blocks on disk. A copy of the
    same weights is another model, which costs a hit and never makes a wrong one.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.suffix in SUFFIXES:
            stat = path.stat()
            digest.update(f"{path.name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()
