"""The runtime of every process: the loop around a core, logs, counters, child processes.

Begin with `loop.py`, which turns a pure core and its effects into a running service.
"""
