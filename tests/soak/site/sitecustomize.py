"""Plants in services, which are processes of the product: Python imports this when it starts.

Only a soak puts this directory on PYTHONPATH, and only for a plant.
"""

from __future__ import annotations

import sys

if "serve" in sys.orig_argv:
    from tests.soak.plants import plant_service

    plant_service(sys.orig_argv[-1])
