"""Engine life: what stands for this run of SGLang's engine where a name must end with it.

Pages may be found wrongly if two engines share a life, and lost if two ranks of one engine differ.
Both functions take the run that SGLang itself names. Without one they differ: only after a `clear`
a generation needs a life, so it accepts the process that began the ranks. Weights need it from the
start, so they accept no process that may have begun several engines.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

LIFE = secrets.token_bytes(8)
"""The life of this rank's process."""
RUN = "SGLANG_RUN_ID"
"""A variable that SGLang draws for each engine before it starts the ranks' processes."""


def life_of_engine() -> bytes:
    """Return the same bytes in all ranks' processes of an engine, and in no other engine.

    SGLang draws a number for each run of an engine. Without one, its first process began them: not
    so with Ray, whose processes begin several engines. Where that process cannot be seen, the life
    of this process: no page of another is found then.
    """
    if run := os.environ.get(RUN):
        return hashlib.blake2b(run.encode(), digest_size=8).digest()
    parent = os.getppid()
    try:
        began = Path(f"/proc/{parent}/stat").read_bytes().rpartition(b")")[2].split()[19]
    except OSError:  # It is in another PID namespace, or hidden.
        return LIFE
    return hashlib.blake2b(b"%d %b" % (parent, began), digest_size=8).digest()


def life_of_weights(replica: int = 0) -> str:
    """Return what stands for weights that only this life of the engine has, the same in all its
    ranks on a host: where they share pages, one of them stores for all.

    A parent process would not do: that of Ray is the same for several engines.
    """
    life = f"{os.environ.get(RUN) or LIFE.hex()}/{replica}"
    return hashlib.blake2b(life.encode(), digest_size=8).hexdigest()
