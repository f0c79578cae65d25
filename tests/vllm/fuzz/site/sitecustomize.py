"""Plants in services, which are processes of the product: Python imports this when it starts.

Only the fuzzer puts this directory on PYTHONPATH, and only for a plant.
"""

from __future__ import annotations

from tests.vllm.fuzz import plants

plants.plant_service()
