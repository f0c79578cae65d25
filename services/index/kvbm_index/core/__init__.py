"""The index's state machine: which source holds which block, and the longest prefix that is held.

Begin with `core.py`; `chains.py` is the data structure.
"""
