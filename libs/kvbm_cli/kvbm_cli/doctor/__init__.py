"""The command `kvbm doctor`: what this machine offers to KVBM, and what is wrong with it.

`gather.py` looks, and returns facts (`facts.py`); `checks.py` judges them. `live_checks.py` judges
what runs.
"""
