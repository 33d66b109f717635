"""Benchmarks and long random runs, each started as `python -m benchmarks.NAME`.

`README.md` beside them lists what each measures, and its goal. Modules whose names begin with `_` are parts of others.
"""
