"""The engine: verifiers over any causal language model, with our own KV cache."""
