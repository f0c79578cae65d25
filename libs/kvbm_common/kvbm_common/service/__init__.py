"""The parts that every service process shares: start, stop, admin verbs, audit and tracing.

Begin with `process.py`, whose `run` is the main function of each service.
"""
