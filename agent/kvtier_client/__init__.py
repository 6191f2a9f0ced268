"""What runs in an inference engine's process: the client and the adapter for transformers."""
