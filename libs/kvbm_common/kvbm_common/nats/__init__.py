"""The NATS event bus: connections, event streams, verbs, snapshots and the object store.

Begin with `bus.py`; every other module here adds one use of its connection.
"""
