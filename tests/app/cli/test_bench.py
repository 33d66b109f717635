"""The `bench` command: its options, formats, files and exit codes."""

from __future__ import annotations

import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from app.cli import bench, inputs
from app.cli.arguments import make_parser
from app.cli.bench_options import check_bench_options, preset_of
from engine.base.errors import ArgumentError
from engine.base.numa import NumaNode, read_nodes
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.machines.bench.results import FULL, PRESETS, read_results, write_results
from engine.machines.bench.runner import BenchProgress
from engine.machines.rigs.lab import LabRig
from engine.planning.fit.speed_book import SpeedBook, read_speed_book, write_speed_book
from engine.planning.speed.answers import TokenTiming
from tests.support.bench import measured, results_of
from tests.support.command_line import run_here
from tests.support.models import write_tiny_llama


def parsed(*words: str) -> Namespace:
    line = ["bench", "model.gguf", *words]
    return make_parser(line).parse_args(line)


def test_presets_and_their_numbers() -> None:
    assert preset_of(parsed()) == PRESETS["quick"]
    assert preset_of(parsed("--long")).depths == (0, 4096, 16384, FULL)
    found = preset_of(parsed("--normal", "--rounds", "9", "--depth", "0,1k,full", "--prompt-tokens", "64"))
    assert (found.n_rounds, found.depths, found.prompt_tokens, found.answer_tokens) == (9, (0, 1024, FULL), 64, 128)


@pytest.mark.parametrize("words", [("--json", "--csv"), ("--csv", "--markdown"), ("--auto", "fewest", "--layout", "a")])
def test_what_contradicts_itself_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError, match="exclude each other"):
        check_bench_options(parsed(*words))


def test_a_split_by_node_has_layouts_of_its_own() -> None:
    for words in (("--rig", "r.json"), ("--layout", "l.json"), ("--auto", "all")):
        with pytest.raises(ArgumentError, match="--numa-nodes makes its own rig and layouts"):
            check_bench_options(parsed("--numa-nodes", *words))


@pytest.mark.parametrize("words", [("--quick", "--long"), ("--depth", "deep"), ("--rounds", "0")])
def test_options_that_cannot_be_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError):
        parsed(*words)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "m.gguf", n_layers=2)


SHORT = ("--device", "CPU", "--ctx", "512", "--threads", "1", "--threads-batch", "1", "--prompt-tokens", "32",
         "--answer-tokens", "16")  # fmt: skip


def test_results_are_printed_written_and_read_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    theirs = results_of(measured("theirs", [1.0] * 5), model="another")
    write_results(tmp_path / "theirs.json", theirs)
    out = tmp_path / "r.json"
    answer = run_here(
        capsys, "bench", str(model), *SHORT, "--rounds", "1", "--json", "--out", str(out), "--beside",
        str(tmp_path / "theirs.json"),
    )  # fmt: skip
    assert answer.code == 0, answer.err
    document = json.loads(answer.out)
    assert document["results"]["layouts"][0]["name"] == "initial"
    assert document["beside"][0]["layouts"][0]["name"] == "theirs"
    assert len(read_results(out).layouts[0].samples) == 1


def test_on_one_numa_node_there_is_nothing_to_compare(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "read_nodes", lambda: (NumaNode(0, frozenset({0, 1}), GIB),))
    answer = run_here(capsys, "bench", str(model), "--numa-nodes", "--json")
    assert answer.code == 2
    assert "one NUMA node (node 0: CPUs 0-1, 1.00 GiB)" in answer.error["message"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone describes NUMA nodes")
def test_nodes_take_turns_with_the_cpu(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    # This computer may have one node: the rig of the test has a worker for that one.
    here = [node for node in read_nodes() if node.can_serve][:1]
    monkeypatch.setattr(bench, "numa_rig", lambda _nodes: LabRig([64 * MIB], nodes=here))
    answer = run_here(capsys, "bench", str(model), *SHORT[2:], "--rounds", "1", "--numa-nodes", "--json")
    assert answer.code == 0, answer.err
    layouts = json.loads(answer.out)["layouts"]
    assert [each["name"] for each in layouts] == ["CPU", "CPU, distribute", "NUMA nodes"]
    assert all(each["samples"] for each in layouts)


def test_a_bad_file_of_results_is_told_before_anything_is_loaded(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.json").write_text("{}")
    answer = run_here(capsys, "bench", str(model), "--json", "--beside", str(tmp_path / "r.json"))
    assert answer.code == 2
    assert "no results of a speed comparison" in answer.error["message"]


def test_a_place_without_room_for_results_is_refused(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "missing" / "r.json"):
        with pytest.raises(ArgumentError, match="no file in an existing folder"):
            check_bench_options(parsed("--out", str(out)))
    check_bench_options(parsed("--out", str(tmp_path / "r.json")))


def test_an_interrupt_ends_the_search_for_a_layout(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def search(*_rest: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the search went on")

    monkeypatch.setattr(inputs, "auto_layout", search)
    monkeypatch.setattr(bench, "run_benchmark", lambda *_rest, **_named: pytest.fail("it was measured"))
    answer = run_here(capsys, "bench", str(model), *SHORT, "--auto", "fewest", "--json")
    assert (answer.code, answer.out) == (130, "")


def test_results_that_cannot_be_written_are_printed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"

    def measuring(_request: object, book: SpeedBook, *_rest: object, **_named: object) -> tuple[object, SpeedBook]:
        # The place is gone after the measurement.
        out.mkdir()
        return results_of(measured("initial", [1.0] * 5)), book

    monkeypatch.setattr(bench, "run_benchmark", measuring)
    answer = run_here(capsys, "bench", str(model), *SHORT, "--json", "--out", str(out))
    assert answer.code == 2
    assert answer.document["layouts"][0]["name"] == "initial"
    assert "cannot be written" in answer.err


def test_names_in_saved_results_cannot_control_the_terminal(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path / "theirs.json", results_of(measured("\x1b[2Jevil", [2.0])))
    own = results_of(measured("initial", [1.0] * 5))
    monkeypatch.setattr(bench, "run_benchmark", lambda _request, book, *_rest, **_named: (own, book))
    answer = run_here(capsys, "bench", str(model), *SHORT, "--csv", "--beside", str(tmp_path / "theirs.json"))
    assert "evil" in answer.out
    assert "\x1b" not in answer.out + answer.err


def test_what_others_wrote_to_the_speed_book_meanwhile_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "speeds.json"
    monkeypatch.setattr(bench, "speeds_path", lambda: path)
    ours, theirs = (TokenTiming("class", {"CPU": 1.0}, seconds) for seconds in (1.0, 2.0))

    def measuring(_request: object, book: SpeedBook, *_rest: object, **_named: object) -> tuple[object, SpeedBook]:
        write_speed_book(path, SpeedBook({}, (theirs,)))
        return results_of(measured("initial", [1.0] * 5)), replace(book, answers=(*book.answers, ours))

    monkeypatch.setattr(bench, "run_benchmark", measuring)
    assert run_here(capsys, "bench", str(model), *SHORT, "--json").code == 0
    assert read_speed_book(path).answers == (theirs, ours)


def test_progress_tells_the_remaining_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    line = bench._ProgressLine()
    line(BenchProgress("Loading first", 1, 10, results_of(), 7200.0))
    assert capsys.readouterr().err.endswith("Loading first (1 of 10, about 2 h left)")
    line(BenchProgress("Loading first", 0, 10, results_of()))
    assert capsys.readouterr().err.endswith("Loading first (0 of 10)")
