"""Settings: names, defaults and limits of every variable, and the manual that is made from them.

Begin with `settings.py`; `schema.py` says how one setting is declared.
"""
