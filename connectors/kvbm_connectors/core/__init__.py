"""The connector's state machine, which knows no engine: offers, lookups, loads.

Begin with `core.py`; `messages.py` lists its inputs and outputs.
"""
