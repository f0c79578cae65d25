"""The host tier (G2): an arena in shared memory, offload, onboard, leases."""
