"""Paths of objects in a directory: a name, in a folder for the first digits of its hash.

    <prefix>/v2/<namespace>/<hash>.<parent>.<bytes>.<parts>.<checksum>           the name
    <prefix>/v2/<namespace>/<3 digits>/<hash>.<parent>.<bytes>.<parts>.<checksum>   the file

4,096 folders keep each small: with 100 million objects it has some 24,000 files, which file systems
and their servers take in their stride. Names sort as files in sorted folders do.
"""

from __future__ import annotations

import re

DIGITS = 3
_FILE = re.compile(r"[0-9a-f]{32}\.[^/]+")
_NAME = re.compile(rf"(?P<folder>(?:[^/]+/)*)(?P<file>{_FILE.pattern})")
_FOLDER = re.compile(rf"[0-9a-f]{{{DIGITS}}}")
_NAMESPACE = re.compile(r"[0-9a-f]{64}")


def path_of(name: str) -> str:
    """Return the path of an object, from the directory of the store on."""
    found = _NAME.fullmatch(name)
    if found is None:
        return name
    return f"{found['folder']}{found['file'][:DIGITS]}/{found['file']}"


def is_folder(name: str) -> bool:
    """Tell whether a directory is one of the folders by digits."""
    return _FOLDER.fullmatch(name) is not None


def is_namespace(name: str) -> bool:
    """Tell whether a directory is one of a namespace, which has folders by digits."""
    return _NAMESPACE.fullmatch(name) is not None


def is_object(name: str, digits: str) -> bool:
    """Tell whether a file in the folder of some digits can be an object's.

    Another name has no place in the order of names: `path_of` would put its file elsewhere.
    """
    assert is_folder(digits), f"{digits!r} are no folder's digits"
    return name.startswith(digits) and _FILE.fullmatch(name) is not None


def split_prefix(prefix: str) -> tuple[str, str]:
    """Return the folder that a prefix of names ends in, and the first digits after it."""
    folder, _, digits = prefix.rpartition("/")
    return f"{folder}/" if folder else "", digits
