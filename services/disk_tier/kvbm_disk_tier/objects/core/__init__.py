"""The object tier's state machine and formats, without clock or IO.

Begin with `core.py`; `names.py` and `packing.py` say what an object is called and holds.
"""
