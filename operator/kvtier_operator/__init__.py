"""Watches, one reconcile per kind, rollout control and the pool of agent clients. Never imports torch."""
