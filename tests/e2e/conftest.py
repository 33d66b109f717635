"""The virtual screen that the window tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.desktop import Desktop, open_desktop


@pytest.fixture(scope="module")
def desktop() -> Iterator[Desktop]:
    with open_desktop("1280x800") as opened:
        yield opened
