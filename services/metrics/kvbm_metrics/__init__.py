"""The metrics service: admin API, Prometheus metrics, status."""
