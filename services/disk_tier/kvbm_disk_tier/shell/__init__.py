"""The disk tier's shell: the file of slots, its journal on disk, NIXL, encryption.

Begin with `service.py`, which carries out the effects of the core.
"""
