"""What every part of KVBM shares: identity, slots, wire, bus, NIXL."""
