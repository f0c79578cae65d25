"""What makes a release: `python -m release version X.Y.Z` and `python -m release wheels DIR`.

docs/releasing.md has the recipe.
"""
