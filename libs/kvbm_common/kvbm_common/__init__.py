"""The part that all of KVBM shares: identity, slots, wire, bus, NIXL."""
