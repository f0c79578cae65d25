"""The host tier's state machine, without clock or IO.

Begin with `core.py`, whose `step` takes an input and returns effects; `messages.py` lists both.
"""
