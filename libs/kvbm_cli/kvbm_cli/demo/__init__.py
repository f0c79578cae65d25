"""The command `kvbm demo`: the whole stack, simulated engines, a workload, every block compared.

Begin with `command.py`; `check.py` says what must hold at the end of a run.
"""
