"""The soak: one real stack for minutes or hours, under everything that happens to one.

`python -m tests.soak --minutes 4` runs it; begin with `run.py`. `judge.py` says what may not grow.
"""
