"""Credentials: what `kvbm up` makes, `kvbm creds` lists, and `kvbm nats-config` writes.

Begin with `server_users.py`: how a role of the table becomes a user of nats-server.
"""
