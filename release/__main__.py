"""The commands of a release: `version [X.Y.Z]` and `wheels DIR`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from release.packages import set_version, version
from release.wheels import build, require_ours


def main() -> None:
    """Run one command; exits with 2 for anything else."""
    try:
        _run(sys.argv[1:])
    except (ValueError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        sys.exit(2)


def _run(arguments: list[str]) -> None:
    match arguments:
        case ["version"]:
            print(version())
        case ["version", wanted]:
            set_version(wanted)
        case ["wheels", directory]:
            require_ours(Path(directory))
            shutil.rmtree(directory, ignore_errors=True)
            for path in build(Path(directory)):
                print(path)
        case _:
            print("usage: python -m release version [X.Y.Z] | wheels DIR", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
