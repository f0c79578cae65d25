"""What runs beside an engine: connector core, consolidator, sim engine."""
