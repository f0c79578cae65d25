"""Packages that not every installation has: what needs one names the extra that brings it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvbm_common.errors import ConfigError


class ExtraMissing(ConfigError):
    """A setting needs a package that is not installed. The text names the extra with it."""

    code = "extra_missing"

    def __init__(self, variable: str, package: str, extra: str) -> None:
        super().__init__(variable, "", "")
        self.args = (f"{variable} needs {package}: {install(extra)}",)


def install(extra: str) -> str:
    """Return the command that installs an extra.

    >>> install("s3")
    "pip install 'kvbm-stack[s3]'"
    """
    return f"pip install 'kvbm-stack[{extra}]'"


@contextlib.contextmanager
def needed_for(variable: str, extra: str) -> Iterator[None]:
    """Import what an extra brings inside this; raises ExtraMissing if that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise ExtraMissing(variable, package, extra) from error


@contextlib.contextmanager
def engine_needed(engine: str) -> Iterator[None]:
    """Import an adapter inside this; raises ModuleNotFoundError with the extra of its engine."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        text = f"the adapter of {engine} needs {package}: {install(engine)}"
        raise ModuleNotFoundError(text, name=error.name, path=error.path) from error
