"""Opens many files, so that new descriptors have numbers too large for `select`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

SELECT_LIMIT = 1024
"""`FD_SETSIZE` of all systems that have it."""


@contextmanager
def many_files() -> Iterator[None]:
    """Keep files open until the end of the context, so that new descriptors have numbers too large for `select`."""
    resource = pytest.importorskip("resource", reason="Windows has no such limit, and other numbers")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with ExitStack() as stack:
        first = stack.enter_context(open(os.devnull, "rb"))  # noqa: PTH123 - its number is what matters
        while (number := os.dup(first.fileno())) < SELECT_LIMIT:
            stack.callback(os.close, number)
        stack.callback(os.close, number)
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
