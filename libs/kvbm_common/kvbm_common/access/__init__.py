"""Access: roles on the bus, credentials, TLS, tokens, and which addresses are local.

Begin with `roles.py`: its table is what the server's configuration and the documents follow.
"""
