"""The consolidator's state machine: events of engines and tiers become one stream for each source.

Begin with `core.py`.
"""
