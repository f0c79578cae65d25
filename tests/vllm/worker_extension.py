"""A worker's extension, as RL frameworks have one to write new weights into a running engine."""


class WeightWriter:
    """Mixed into vLLM's worker by `worker_extension_cls`. It adds nothing: tests have vLLM's own
    `reload_weights` write."""
