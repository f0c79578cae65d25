"""The consolidator's shell: sockets to engines and tiers, NATS, and the port for routers.

Begin with `service.py`.
"""
