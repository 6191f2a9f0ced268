"""Peers measured beside kvtier, each in its own process and virtual environment: they pin other versions."""
