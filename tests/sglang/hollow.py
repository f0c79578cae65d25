"""Hollow modules: what SGLang imports on the way to its host pools and never calls there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = ("torchvision", "tvm_ffi")
"""The first has no CPU build beside this torch; kernels need the second."""


class Hollow(ModuleType):
    """A module in which every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(MetaPathFinder, Loader):
    """Finds hollow modules, and all that is inside them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in NAMES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Hollow(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Make them importable. transformers looks first whether it has torchvision: it has not."""
    importlib.import_module("transformers.image_utils")
    sys.meta_path.append(Finder())
