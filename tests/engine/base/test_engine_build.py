"""The versions of the program and of its engine."""

from __future__ import annotations

from importlib import metadata

import pytest

from engine.base.engine_build import own_version


def test_a_source_tree_that_was_never_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", fail)
    own_version.cache_clear()
    try:
        assert own_version() == "not installed"
    finally:
        own_version.cache_clear()
