"""Settings: names, defaults and limits of every variable, and the manual that is made from them.

Begin with `declarations.py`, where every setting is; `settings.py` reads their values.
"""
