"""The commands of a release: `version [X.Y.Z]` and `wheels DIR`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from release.packages import set_version, version
from release.wheels import build


def main() -> None:
    """Run one command; exits with 2 for anything else."""
    match sys.argv[1:]:
        case ["version"]:
            print(version())
        case ["version", wanted]:
            try:
                set_version(wanted)
            except ValueError as error:
                print(f"release: {error}", file=sys.stderr)
                sys.exit(2)
        case ["wheels", directory]:
            shutil.rmtree(directory, ignore_errors=True)
            for path in build(Path(directory)):
                print(path)
        case _:
            print("usage: python -m release version [X.Y.Z] | wheels DIR", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
