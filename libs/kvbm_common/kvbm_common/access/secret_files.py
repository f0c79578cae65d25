"""Secrets in files: read again when the file has changed, and never printed."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

from kvbm_common.errors import ConfigError, KvbmError

SECRET_BYTES_MAX = 64 * 1024
"""A creds file has about a KiB; more is another file."""
OWNER_ONLY = 0o600

_log = logging.getLogger(__name__)


class SecretUnreadable(KvbmError):
    """A file has no secret that can be read. The text names the file, not what is in it."""

    code = "secret_unreadable"


class SecretFile:
    """One file. `text` may be called as often as the secret is needed: it costs a `stat`."""

    def __init__(self, path: Path, variable: str) -> None:
        self.path = path
        self._variable = variable
        self._seen: tuple[int, int, int] | None = None
        self._text = ""

    def __repr__(self) -> str:
        return f"SecretFile({str(self.path)!r})"

    @property
    def owner(self) -> int:
        """The user who owns the file; raises SecretUnreadable."""
        return self._status().st_uid

    @property
    def is_private(self) -> bool:
        """Tell whether no other user may read it; raises SecretUnreadable.

        The owner may have given it to this process by its group, as containers get theirs.
        """
        status = self._status()
        given = status.st_uid != os.geteuid() and status.st_gid == os.getegid()
        return not status.st_mode & (0o037 if given else 0o077)

    def text(self) -> str:
        """Return what is in the file now, without white space around it.

        Raises SecretUnreadable.
        """
        status = self._status()
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen != self._seen:
            self._text = self._read()
            self._seen = seen
        return self._text

    def _status(self) -> os.stat_result:
        try:
            return self.path.stat()
        except OSError as error:
            raise SecretUnreadable(f"{self._variable}: {self.path}: {error.strerror}") from error

    def _read(self) -> str:
        try:
            with self.path.open("rb") as file:
                raw = file.read(SECRET_BYTES_MAX + 1)
            text = raw.decode("ascii").strip()
        except OSError as error:
            raise SecretUnreadable(f"{self._variable}: {self.path}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise SecretUnreadable(f"{self._variable}: {self.path} is no ASCII text") from None
        if not text or len(raw) > SECRET_BYTES_MAX:
            raise SecretUnreadable(f"{self._variable}: {self.path} is empty, or too long")
        return text


def is_kept_private(path: Path) -> bool:
    """Tell whether a secret that this program has made is there, and no other user could set it.

    One that others could read or write is taken for known or foreign, which the log says.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    mine = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if mine and not status.st_mode & 0o077:
        return True
    _log.warning("%s was open to other users: a new secret is made", path)
    return False


def make_private_directory(path: Path, variable: str) -> None:
    """Make a directory for what is the owner's alone, with mode 0700.

    Raises ConfigError for one of another user, or one to which others may write.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise ConfigError(variable, path, f"a directory of yours ({error})") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022 or path.is_symlink():
        accepted = "a directory of yours that no other user may write to"
        raise ConfigError(variable, path, accepted)


def write_secret(path: Path, text: str, *, mode: int = OWNER_ONLY) -> None:
    """Write a file that only its owner may read, at once: a reader sees the old text or the new.

    A `mode` names other readers.

    Raises OSError.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    # Whatever the locale says; a path that is no UTF-8 goes out as it came in.
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
    draft.replace(path)
