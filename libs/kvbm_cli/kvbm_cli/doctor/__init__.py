"""The command `kvbm doctor`: what this machine offers to KVBM, and what is wrong with it.

`facts.py` looks, `checks.py` judges what was found; `live_checks.py` judges what runs.
"""
