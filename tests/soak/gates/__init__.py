"""Thousands of simulated rollouts, judged by the production verdict function."""
