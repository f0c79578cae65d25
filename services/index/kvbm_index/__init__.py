"""The index: which source holds which block in which tier, and prefix match."""
