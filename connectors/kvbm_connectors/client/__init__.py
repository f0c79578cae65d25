"""The two halves of a connector that an engine runs: scheduler and worker, with their links.

Begin with `scheduler.py` and `worker.py`; the rules are in `kvbm_connectors.core`.
"""
