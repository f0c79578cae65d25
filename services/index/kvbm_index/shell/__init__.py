"""The index's shell: subscriptions, verbs, and images of the index in the object store.

Begin with `service.py`.
"""
