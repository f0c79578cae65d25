"""The sim engine: a process with a real paged KV cache and no model, and a workload to drive it."""
