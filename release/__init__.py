"""What makes a release: `python -m release version X.Y.Z` and `python -m release wheels DIR`.

docs/releasing.md has the recipe. The documents that are written from the code: `asyncapi`,
`settings_manual` and `wire_manual`.
"""
