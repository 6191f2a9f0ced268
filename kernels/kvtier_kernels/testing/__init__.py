"""Helpers for tests of kernels; nothing here runs in production."""
