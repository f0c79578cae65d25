"""NIXL: an agent in a thread of its own that moves spans of memory, files and objects.

Begin with `mover_thread.py`; `library.py` is the only module that imports the binding.
"""
