"""What a process can see of how it was started, as a line of JSON; then it ends as it is told.

`python -m tests.vllm.start_probe HOW`: with exit code 3 (`exit`), by an exception (`raise`), or at
the end of its stdin (`read`). `import` imports first what an engine does, and ends so, too.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading

import numpy

from tests.vllm.template_process import import_engine

LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_AS)


def seen() -> dict[str, object]:
    """Return what must not depend on who has made this process, but for `parent` and `drawn`."""
    main = sys.modules["__main__"]
    return {
        "arguments": sys.argv,
        "main": [main.__name__, main.__file__, main.__spec__ and main.__spec__.name],
        "environ": dict(os.environ),
        "directory": os.getcwd(),
        "path": sys.path,
        "descriptors": {
            name: os.readlink(f"/proc/self/fd/{name}").partition(":")[0]
            for name in sorted(os.listdir("/proc/self/fd"))
            if os.path.exists(f"/proc/self/fd/{name}")
        },
        "signals": {str(one): str(signal.getsignal(one)) for one in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "group": [os.getpgrp(), os.getsid(0)],
        "limits": [resource.getrlimit(one) for one in LIMITS],
        "nice": os.nice(0),
        "processors": sorted(os.sched_getaffinity(0)),
        "threads": threading.active_count(),
        "parent": os.getppid(),
        "drawn": [random.random(), numpy.random.random()],
        "ours": sorted(name for name in sys.modules if name.startswith("kvbm")),
    }


if __name__ == "__main__":
    if sys.argv[1] == "import":
        import_engine()
    print(json.dumps(seen()), flush=True)
    match sys.argv[1]:
        case "exit":
            sys.exit(3)
        case "raise":
            raise ValueError("as told")
        case "read" | "import":
            sys.stdin.buffer.read()
