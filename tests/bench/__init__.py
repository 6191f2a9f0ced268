"""Measurements. Each module `bench_<suite>.py` has a function `rows()` that yields `tests.bench.rows.Row`."""
