"""The part of KVBM beside an engine: connectors, consolidator, and a simulated engine."""
