"""`kubectl kvtier`: rollouts for people, from the Kubernetes API alone."""
