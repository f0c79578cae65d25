"""The command `kvbm`: the stack on one machine, the demo, and what operators do with a running one.

Begin with `main.py`; `stack.py` starts NATS and the services, each in a process.
"""
