"""The environment of Dynamo's own indexer: `.venv-dynamo`, made on first use from the PyPI wheel.

It has nothing of ours: what it holds, it has heard on ZMQ.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REQUIREMENT = "ai-dynamo-runtime==1.6.1"
DIRECTORY = Path(__file__).resolve().parents[1] / ".venv-dynamo"


def dynamo_python() -> Path:
    """The environment's interpreter; raises CalledProcessError when it cannot be made."""
    python, stamp = DIRECTORY / "bin" / "python", DIRECTORY / ".setup-stamp"
    if not stamp.exists() or stamp.read_text() != REQUIREMENT:
        subprocess.run([sys.executable, "-m", "venv", DIRECTORY], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", REQUIREMENT], check=True)
        stamp.write_text(REQUIREMENT)
    return python
