"""Reads the resource files of the program."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def read_text(name: str) -> str:
    """Return the text of the resource `name`, for example `style.qss`."""
    return (files("resources") / name).read_text(encoding="utf-8")


def read_bytes(name: str) -> bytes:
    """Return the bytes of the resource `name`, for example `layerdeck.svg`."""
    return (files("resources") / name).read_bytes()


def folder() -> Path:
    """Return the folder of the resources, for files that Qt opens itself, such as images of the stylesheet."""
    return Path(str(files("resources")))


def handbook() -> Path:
    """Return the folder of the handbook: Markdown pages and their images."""
    return folder().parent / "docs" / "handbook"
