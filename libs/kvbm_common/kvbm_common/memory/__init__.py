"""Memory that processes of one host share: the arena, huge pages, the table of committed blocks.

Begin with `arena.py`.
"""
