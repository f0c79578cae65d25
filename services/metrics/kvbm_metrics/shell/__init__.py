"""The metrics service's shell: the HTTP API, questions to other services, jobs, the live page.

Begin with `service.py`; `api.py` has the routes.
"""
