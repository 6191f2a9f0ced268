"""Edits of what a session's history is: fork, truncate, drop, reposition."""
