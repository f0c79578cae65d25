"""TensorRT-LLM: what of it speaks another language than vLLM."""
