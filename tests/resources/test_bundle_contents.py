"""The bundle's links for equal files, and its size table."""

from __future__ import annotations

from pathlib import Path

from resources.bundle.contents import MODELS, link_copies, size_table


def test_copies_beside_each_other_become_links_to_the_one_with_the_whole_version(tmp_path: Path) -> None:
    library = tmp_path / "lib"
    library.mkdir()
    for name in ("libx.so", "libx.so.0", "libx.so.0.5.1"):
        (library / name).write_bytes(b"x" * 1000)
    (library / "liby.so").write_bytes(b"y" * 1000)
    (tmp_path / "libx.so").write_bytes(b"x" * 1000)  # elsewhere: found by another path
    (library / "text.txt").write_bytes(b"x" * 1000)
    assert link_copies(tmp_path) == 2000
    assert (library / "libx.so").readlink() == (library / "libx.so.0").readlink() == Path("libx.so.0.5.1")
    assert (library / "libx.so").read_bytes() == b"x" * 1000
    assert not (tmp_path / "libx.so").is_symlink()
    assert not (library / "text.txt").is_symlink()
    assert link_copies(tmp_path) == 0


def test_the_table_adds_up_and_counts_no_link_and_no_model(tmp_path: Path) -> None:
    internal = tmp_path / "_internal"
    (internal / "numpy").mkdir(parents=True)
    (internal / "numpy" / "core.so").write_bytes(b"n" * 2_000_000)
    (internal / "libz.so.1").write_bytes(b"z" * 600_000)
    (internal / "libz.so").symlink_to("libz.so.1")
    (tmp_path / "layerdeck").write_bytes(b"p" * 1_000_000)
    (internal / "small.txt").write_bytes(b"s" * 400_000)
    (tmp_path / MODELS).mkdir()
    (tmp_path / MODELS / "demo.gguf").write_bytes(b"m" * 5_000_000)
    rows = [line for line in size_table(tmp_path).splitlines() if line.startswith("| ")][1:]
    assert [row.split("|")[1].strip() for row in rows] == [
        "numpy",
        "program",
        "system libraries",
        "everything under 0.5 MB",
        "**all**",
    ]
    assert "**4.0**" in rows[-1]
