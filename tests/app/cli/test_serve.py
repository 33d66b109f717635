"""The command `serve`: its end, and the options of its access."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from app.cli import serve
from app.cli.arguments import make_parser
from app.cli.serve_options import access_of
from engine.api.server.server import Address
from tests.support.command_line import run_here
from tests.support.models import write_tiny_llama


class EndingServer:
    """A server that ends while it loads a model: the load never ends."""

    address = Address()

    def __init__(self, *_arguments: Any, on_end: Callable[[], object], **_others: Any) -> None:
        self._on_end = on_end

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def preload(self, _entry: object) -> Future[None]:
        """Return a load of a server that ends meanwhile."""
        self._on_end()
        return Future()


def test_the_end_of_the_server_ends_the_load_before_its_first_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "ApiServer", EndingServer)
    path = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=1)
    answer = run_here(capsys, "serve", path, "--only")
    assert answer.code == 0
    assert "loaded" not in answer.err


def test_origins_and_host_names_are_lower_case_as_in_requests() -> None:
    line = ["serve", "--allow-origin", "HTTP://LocalHost:3000", "--allow-origin", "app://obsidian.md"]
    access = access_of(make_parser(line).parse_args([*line, "--allow-host", "Box.example."]))
    assert access.origins == {"http://localhost:3000", "app://obsidian.md"}
    assert "box.example" in access.hosts
