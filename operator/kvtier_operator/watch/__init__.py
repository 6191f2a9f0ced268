"""Watching: kopf in a thread of its own feeds the read cache and names the keys that a change concerns."""
