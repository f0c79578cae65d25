"""The metrics service's calculations, without clock or IO: rates, flows, metrics of the fleet.

Begin with `collector.py`.
"""
