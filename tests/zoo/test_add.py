"""A new model is recorded and packed by one command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import write_tiny_llama
from tests.zoo import add, pack


@pytest.mark.exhaustive
def test_a_model_is_recorded_on_workers_and_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("headers", "truth"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(pack, "FOLDER", tmp_path)
    path = write_tiny_llama(tmp_path / "fresh.gguf", n_layers=4)
    add.main([str(path)])
    assert (tmp_path / "headers" / "fresh.gguf.head.gz").exists()
    document = pack.read_document("fresh")
    assert document["size_bytes"] == path.stat().st_size
    measured = [case for case in document["cases"] if "error" not in case]
    assert {(case["stand_ins"], case["load"]) for case in measured} == {("rpc", "no_alloc"), ("rpc", "real")}
    assert all(sum(case["host"]) + sum(map(sum, case["devices"].values())) > 0 for case in measured)
