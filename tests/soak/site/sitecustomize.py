"""What a soak puts into every process of its stack: Python imports this when it starts.

Only a soak puts this directory on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys

if os.environ.get("KVBM_SOAK_CLOCK") and "moto.server" not in sys.orig_argv:
    from tests.soak.clock import follow

    follow()

if "serve" in sys.orig_argv:
    from tests.soak.plants import plant_service

    plant_service(sys.orig_argv[-1])
    if os.environ.get("KVBM_SOAK_CENSUS"):
        from tests.soak.census import begin

        begin()
