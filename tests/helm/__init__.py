"""The Helm chart: rendered by helm, and compared with what it was not written from."""
