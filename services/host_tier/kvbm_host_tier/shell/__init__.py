"""The host tier's shell: sockets, the arena, NIXL, and the processes that other hosts read through.

Begin with `service.py`, which turns messages into inputs of the core and carries out its effects.
"""
