"""Benchmark of layouts: loads them in turns, measures answers, and compares the speeds with confidence intervals."""
