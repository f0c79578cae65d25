"""The pure parts of a tier: slots, blocks, leases, announcements, departures.

Begin with `slots.py`, the table that says what each slot of a tier holds.
"""
