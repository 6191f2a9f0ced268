"""The demo: every part of kvtier on real parts, with each claim checked.

Run it with ``python -m tests.e2e.demo``. Nothing here decides an outcome: it
starts processes, applies objects, watches what users can watch, and compares.
"""
