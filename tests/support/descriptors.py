"""A process with so many open files that further ones have numbers that `select` does not take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

SELECT_LIMIT = 1024
"""`FD_SETSIZE` of every system that has one."""


@contextmanager
def many_files() -> Iterator[None]:
    """So many open files that all further ones have numbers that `select` does not take."""
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
