"""What the API server would say of a file, and what the operator would, without a cluster."""
