"""What runs in an inference engine's process: the client, its sessions and the transformers adapter."""
