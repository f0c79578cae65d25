"""The object tier's shell: the bucket, its mover, deletions and their retries.

Begin with `service.py`.
"""
