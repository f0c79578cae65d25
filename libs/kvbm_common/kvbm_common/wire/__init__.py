"""The wire: every message that crosses a process border, typed and versioned.

`events`  NATS, JSON: what a tier or an engine stored, removed, cleared.
`packed_events`  NATS, msgpack: many of these events in one message.
`verbs`, `index_verbs`  NATS, JSON: requests and replies of the services.
`local`, `consolidator`  ZMQ, msgpack: an engine's messages with its host tier and consolidator.
`engine_events`  ZMQ, msgpack: vLLM's event frames, both layouts.

Hashes are 32 hex digits in JSON and packed raw bytes in msgpack. Evolution follows msgspec's rules:
a new field gets a default, no field changes its type, an unknown field is ignored.
"""

VERSION = 1
"""The major version of every message; it is also in every subject (`kvbm.v1.…`)."""
