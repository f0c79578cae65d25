"""The registry: which services are present, in NATS key-value buckets or in etcd.

Begin with `services.py`; `presence.py` is the pure part of the reader of etcd.
"""
