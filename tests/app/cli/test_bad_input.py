"""Wrong files and values: one error document that names the file or value, and the contract's exit code."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from app.cli.arguments import make_parser
from app.paths import chats_path
from engine.chat.conversation import Conversation
from engine.chat.store import ChatStore
from tests.support.command_line import Answer, run_here
from tests.support.gguf_bytes import GgufBytes, Tensor, default_tensors, text_value
from tests.support.models import write_tiny_llama
from tests.support.rpc_peers import ANSWER, HELLO_BYTES, receive, rpc_server, serve_peer
from tests.support.unknown_graphs import LOOPED_ARCHITECTURE, LOOPED_METADATA, know_no_graphs

N_LAYERS = 8
BAD_FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "empty"),
    "cut in the header": (lambda: GgufBytes().header()[:60], "incomplete"),
    "cut in the weights": (lambda: GgufBytes().build()[:-100], "file"),
    "not a model": (lambda: b"\x89PNG\r\n\x1a\n" + bytes(200), "GGUF"),
    "text": (lambda: b"# a readme\n" * 30, "GGUF"),
    "big endian": (lambda: b"GGUF" + pack(">I", 3) + bytes(200), "big-endian"),
    "version 1": (lambda: GgufBytes(version=pack("<I", 1)).build(), "version 1"),
    "version 9": (lambda: GgufBytes(version=pack("<I", 9)).build(), "version 9"),
    "absurd count of keys": (lambda: GgufBytes(n_pairs=1 << 61).build(), "2305843009213693952"),
    "absurd count of tensors": (lambda: GgufBytes(n_tensors=1 << 60).build(), "1152921504606846976"),
    "absurd length of a text": (
        lambda: GgufBytes(pairs={"general.architecture": pack("<IQ", 8, 1 << 62)}).build(),
        "incomplete",
    ),
    "tensor past the end": (
        lambda: GgufBytes(tensors=[*default_tensors(), Tensor("output.weight", offset=1 << 30)]).build(),
        "output.weight",
    ),
    "no architecture": (lambda: GgufBytes(pairs={"general.name": text_value("x")}).build(), "architecture"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a model that loads."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", n_layers=N_LAYERS)


@pytest.fixture
def rig_file(tmp_path: Path) -> Path:
    """Return a rig of two workers that nobody serves."""
    return write_json(tmp_path / "rig.json", rig_document())


def rig_document(**changes: Any) -> dict[str, Any]:
    """Return a rig of two workers; `changes` are for the second one."""
    devices = [worker("RPC0", "127.0.0.1:1"), {**worker("RPC1", "127.0.0.1:2"), **changes}]
    return {"version": 1, "devices": devices, "host": {"total_bytes": "8GiB"}}


def worker(device_id: str, endpoint: str) -> dict[str, Any]:
    return {"id": device_id, "backend": "RPC", "endpoint": endpoint, "total_bytes": "256MiB"}


def write_json(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def check_refusal(answer: Answer, code: int, kind: str, *words: str) -> dict[str, Any]:
    """Fail unless `answer` is one error document of this kind that says these words; return it."""
    assert answer.code == code, answer
    assert answer.err == ""
    assert answer.error["kind"] == kind
    for word in words:
        assert word in answer.error["message"]
    assert answer.error["message"].count("\n") == 0
    return answer.error


@pytest.mark.parametrize("command", ["inspect", "plan", "load"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_readable_model(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, word = BAD_FILES[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content())
    error = check_refusal(run_here(capsys, command, path, "--json"), 4, "model_file", "bad.gguf", word)
    assert error["path"] == str(path)

    people = run_here(capsys, command, path)
    assert (people.code, people.out) == (4, "")
    assert people.err == f"layerdeck-cli: {error['message']}\n"


@pytest.mark.parametrize("command", ["inspect", "plan", "load"])
def test_a_file_that_is_not_there_and_a_folder(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = run_here(capsys, command, tmp_path / "missing.gguf", "--json")
    check_refusal(missing, 4, "model_file", "missing.gguf", "no such file")
    check_refusal(run_here(capsys, command, tmp_path, "--json"), 4, "model_file", tmp_path.name)


def test_a_path_that_is_not_utf_8_is_inspected_and_not_loaded(
    tmp_path: Path, tiny: Path, rig_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / os.fsdecode(b"\xff.gguf")
    path.write_bytes(tiny.read_bytes())
    inspected = run_here(capsys, "inspect", path, "--json")
    assert (inspected.code, inspected.document["parts"]) == (0, ["\\udcff.gguf"])
    layout = write_json(tmp_path / "l.json", {"version": 1, "runs": [{"device": "CPU", "layers": "0-7"}]})
    answer = run_here(capsys, "load", path, "--rig", rig_file, "--layout", layout, "--json")
    assert answer.code == 4
    assert answer.error["kind"] == "model_file"
    assert "not UTF-8" in answer.error["message"]


def test_a_missing_part_is_named(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = tmp_path / "model-00001-of-00003.gguf"
    pairs = GgufBytes().pairs | {"split.count": pack("<IH", 2, 3), "split.no": pack("<IH", 2, 0)}
    GgufBytes(pairs=pairs).write(first)
    answer = run_here(capsys, "inspect", first, "--json")
    check_refusal(answer, 4, "model_file", "model-00002-of-00003.gguf")


BAD_LAYOUTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "gap": ({"runs": [{"device": "RPC0", "layers": "0-2"}, {"device": "CPU", "layers": "4-7"}]}, "runs", "3"),
    "overlap": ({"runs": [{"device": "RPC0", "layers": "0-4"}, {"device": "CPU", "layers": "4-7"}]}, "runs", "4"),
    "not from 0": ({"runs": [{"device": "CPU", "layers": "1-7"}]}, "runs", "0"),
    "too few layers": ({"runs": [{"device": "CPU", "layers": "0-5"}]}, "runs", "layers 0-7"),
    "layers of another model": (
        {"model": {"name": "x", "layers": 12}, "runs": [{"device": "CPU", "layers": "0-11"}]},
        "model.layers",
        "12 layers",
    ),
    "unknown key": ({"runs": [{"device": "CPU", "layers": "0-7", "speed": 3}]}, "runs[0]", '"speed"'),
    "unknown key of the context": (
        {"runs": [{"device": "CPU", "layers": "0-7"}], "context": {"ctx": 5}},
        "context",
        '"ctx"',
    ),
    "no runs": ({}, "runs", "missing"),
    "another version": ({"version": 2, "runs": []}, "version", "2"),
}


@pytest.mark.parametrize("command", ["plan", "load"])
@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_a_layout_file_that_cannot_be_used(
    name: str, command: str, tmp_path: Path, tiny: Path, rig_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, place, word = BAD_LAYOUTS[name]
    layout = write_json(tmp_path / "l.json", {"version": 1, **content})
    answer = run_here(capsys, command, tiny, "--rig", rig_file, "--layout", layout, "--json")
    error = check_refusal(answer, 2, "layout", "l.json", word)
    assert error.get("place", "").startswith(place)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"version": 1, "version": 1}', b"[" * 100_000])
def test_a_layout_file_that_is_no_document(
    content: bytes, tmp_path: Path, tiny: Path, rig_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = tmp_path / "l.json"
    layout.write_bytes(content)
    answer = run_here(capsys, "plan", tiny, "--rig", rig_file, "--layout", layout, "--json")
    check_refusal(answer, 2, "layout", "l.json")


def test_files_that_are_not_there(
    tmp_path: Path, tiny: Path, rig_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "none.json"
    answer = run_here(capsys, "load", tiny, "--rig", rig_file, "--layout", missing, "--json")
    check_refusal(answer, 2, "layout", "none.json")
    check_refusal(run_here(capsys, "load", tiny, "--rig", missing, "--json"), 2, "rig", "none.json")


BROKEN_RULES: dict[str, tuple[list[dict[str, str]], str, str]] = {
    "unknown_device": ([{"device": "CUDA7", "layers": "0-7"}], "CUDA7", "RPC0, RPC1, CPU"),
    "too_many_entries": (
        [{"device": ("RPC0", "CPU")[index % 2], "layers": str(index)} for index in range(20)],
        "20",
        "15",
    ),
}


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_a_broken_rule_is_listed_by_plan_and_refuses_a_load(
    rule: str, tmp_path: Path, rig_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, *words = BROKEN_RULES[rule]
    n_layers = int(runs[-1]["layers"].rpartition("-")[2]) + 1
    model = write_tiny_llama(tmp_path / "model.gguf", n_layers=n_layers, n_embd=32, n_ff=32, n_head=2, n_head_kv=1)
    layout = write_json(tmp_path / "l.json", {"version": 1, "runs": runs})
    words_of_both = ("--rig", rig_file, "--layout", layout)

    plan = run_here(capsys, "plan", model, *words_of_both, "--json")
    assert plan.code == 2
    assert list(plan.document)[:4] == ["layout", "devices", "fits", "violations"]
    assert plan.document["fits"] is False
    (violation,) = plan.document["violations"]
    assert list(violation) == ["rule", "message", "remedy"]
    assert violation["rule"] == rule
    for word in words:
        assert word in violation["message"]

    load = run_here(capsys, "load", model, *words_of_both, "--json")
    error = check_refusal(load, 2, "layout", violation["message"], violation["remedy"])
    assert error["violations"] == [violation]

    people = run_here(capsys, "plan", model, *words_of_both)
    assert people.code == 2
    assert violation["message"] in people.out


BAD_RIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "negative size": (rig_document(total_bytes=-5), "devices[1].total_bytes", "-5"),
    "doubled id": (rig_document(id="RPC0"), "devices[1].id", '"RPC0"'),
    "same endpoint twice": (rig_document(endpoint="127.0.0.1:1"), "devices[1].endpoint", "127.0.0.1:1"),
    "unknown key": (rig_document(colour="red"), "devices[1]", '"colour"'),
    "no endpoint": (rig_document(endpoint=None), "devices[1].endpoint", "endpoint"),
    "a device called CPU": (rig_document(id="CPU"), "devices[1].id", "host"),
    "no host": ({"version": 1, "devices": []}, "host", "missing"),
    "no size that we read": (rig_document(total_bytes="24 gigs"), "devices[1].total_bytes", "24 gigs"),
}


@pytest.mark.parametrize("command", ["plan", "load"])
@pytest.mark.parametrize("name", BAD_RIGS)
def test_a_rig_file_that_cannot_be_used(
    name: str, command: str, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, place, word = BAD_RIGS[name]
    rig = write_json(tmp_path / "r.json", content)
    error = check_refusal(run_here(capsys, command, tiny, "--rig", rig, "--json"), 2, "rig", "r.json", word)
    assert error["place"] == place


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["inspect"], "FILE"),
        (["plan", "x.gguf", "--ctx", "0"], '"0"'),
        (["plan", "x.gguf", "--type-k", "q3_0"], "q3_0"),
        (["load", "x.gguf", "-n", "many"], '"many"'),
        (["load", "x.gguf", "--temp", "hot"], '"hot"'),
        (["load", "x.gguf", "--seed", "1.5"], "1.5"),
        (["load", "x.gguf", "--stall-limit", "0"], '"0" is not a stall limit; use 5 to 86400 seconds'),
        (["chat", "x.gguf", "--stall-limit", "-3"], "--stall-limit"),
        (["load", "x.gguf", "--auto", "quickest"], "fewest, priority, balanced"),
        (["plan", "x.gguf", "--auto", "fewest", "--layout", "l.json"], "--layout"),
        (["load", "x.gguf", "--la", "l.json"], "--la"),
        (["load", "x.gguf", "--prompt", "\udcff"], "UTF-8"),
        (["search", "x", "--author", "\udcff"], "The author is not valid UTF-8"),
        (["search", "x", "--tag", "\udcff"], "A tag is not valid UTF-8"),
        (["packs", "trust", f"ed25519:{'A' * 43}=", "--name", "\udcff"], "The name is not valid UTF-8"),
        (["rig", "pair", "127.0.0.1:1", "K7QM-3XHD-9RWP-T2FV", "--name", "\udcff"], "The name is not valid UTF-8"),
        (["rig", "lab"], "--workers"),
        (["rig", "lab", "--workers", "1GiB", "--numa-nodes"], "give one of them"),
        (["rig", "lab", "--workers", "1XB"], '"1XB"'),
        (["rig", "lab", "--workers", "512MiB,,1GiB"], '""'),
        (["rig", "lab", "--workers", "0"], "above 0"),
        (["rig", "serve", "--port", "70000"], '"70000"'),
        (["devices", "--rpc", "somewhere"], '"somewhere"'),
        (["devices", "--rpc", "127.0.0.1:1", "--rpc", "127.0.0.1:1"], "twice"),
        (["chat"], "chat"),
    ],
)
def test_arguments_that_cannot_be_used(words: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = check_refusal(run_here(capsys, *words, "--json"), 2, "argument", word)
    people = run_here(capsys, *words)
    assert (people.code, people.out) == (2, "")
    assert people.err == f"layerdeck-cli: {error['message']}\n"


def test_tools_that_are_stored_with_a_conversation_are_not_blamed_on_an_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with closing(ChatStore(chats_path(), makes_copies=False)) as store:
        store.save(Conversation(id="ada", tools="[{")).result()
    answer = run_here(capsys, "chat", "x.gguf", "--conversation", "ada")
    assert answer.code == 2
    assert "--conversation: the tools saved in" in answer.err
    assert "--tools:" not in answer.err


def not_an_answer(client: socket.socket) -> None:
    receive(client, 1)
    client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" + bytes(64))


def silent(client: socket.socket) -> None:
    receive(client, HELLO_BYTES)
    client.recv(1)


@pytest.fixture
def bad_endpoint(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, str]]:
    """Yield an endpoint that is `request.param`, the error kind and a word of the sentence."""
    other_version = ANSWER[:8] + bytes([6]) + ANSWER[9:]
    match request.param:
        case "refused":
            with serve_peer(silent) as endpoint:
                pass
            yield endpoint, "unreachable", "refused"
        case "busy":
            with serve_peer(silent) as endpoint, socket.create_connection(parse(endpoint)):
                yield endpoint, "busy", "one program at a time"
        case "version":
            with rpc_server(answer=other_version) as endpoint:
                yield endpoint, "unreachable", "version 6.0"
        case "http":
            with serve_peer(not_an_answer) as endpoint:
                yield endpoint, "unreachable", "not that of an RPC worker"
        case "silent":
            with socket.create_server(("127.0.0.1", 0)) as listener:
                yield f"127.0.0.1:{listener.getsockname()[1]}", "busy", "did not answer"


def parse(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("bad_endpoint", ["refused", "version", "http", "silent"], indirect=True)
def test_devices_of_an_endpoint_that_is_no_free_worker(
    bad_endpoint: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, kind, word = bad_endpoint
    error = check_refusal(run_here(capsys, "devices", "--rpc", endpoint, "--json"), 6, kind, endpoint, word)
    assert error["endpoint"] == endpoint


@pytest.mark.parametrize("bad_endpoint", ["refused", "busy", "version", "http"], indirect=True)
def test_loading_on_an_endpoint_that_is_no_free_worker(
    bad_endpoint: tuple[str, str, str], tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, kind, word = bad_endpoint
    rig = write_json(tmp_path / "rig.json", rig_document(endpoint=endpoint))
    layout = write_json(tmp_path / "l.json", {"version": 1, "runs": [{"device": "RPC1", "layers": "0-7"}]})
    words = (tiny, "--rig", rig, "--layout", layout, "--json")
    check_refusal(run_here(capsys, "load", *words), 6, kind, "RPC1", endpoint, word)
    # A forecast needs nobody to answer.
    assert run_here(capsys, "plan", *words).code == 0


@pytest.mark.parametrize("bad_endpoint", ["refused", "http"], indirect=True)
def test_probing_on_an_endpoint_that_is_no_free_worker(
    bad_endpoint: tuple[str, str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint, kind, word = bad_endpoint
    know_no_graphs(monkeypatch)
    rig = write_json(tmp_path / "rig.json", rig_document(endpoint=endpoint))
    layout = write_json(tmp_path / "l.json", {"version": 1, "runs": [{"device": "RPC1", "layers": "0-3"}]})
    unknown = write_tiny_llama(
        tmp_path / "unknown.gguf", n_layers=4, architecture=LOOPED_ARCHITECTURE, extra_metadata=LOOPED_METADATA
    )
    answer = run_here(capsys, "plan", unknown, "--rig", rig, "--layout", layout, "--json")
    check_refusal(answer, 6, kind, "RPC1", endpoint, word)


def test_a_local_device_that_is_not_there(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rig = write_json(
        tmp_path / "rig.json",
        {
            "version": 1,
            "devices": [{"id": "CUDA9", "backend": "CUDA", "total_bytes": "8GiB"}],
            "host": {"total_bytes": "8GiB"},
        },
    )
    assert run_here(capsys, "plan", tiny, "--rig", rig, "--json").code == 0
    load = run_here(capsys, "load", tiny, "--rig", rig, "--json")
    assert load.code == 6
    assert load.events[-1]["event"] == "failed"
    assert load.events[-1]["kind"] == "unreachable"
    assert "CUDA9" in load.events[-1]["message"]
    check_refusal(run_here(capsys, "plan", tiny, "--rig", rig, "--probe", "--json"), 6, "unreachable", "CUDA9")


@pytest.mark.parametrize("size", ["120M", "120MB", "120mb", "120 MiB"])
def test_every_size_option_takes_the_usual_units(size: str) -> None:
    for words, name in (
        (["rig", "serve", "--port", "1", "--keep", size], "keep"),
        (["download", "org/model", "--reserve", size], "reserve"),
    ):
        assert getattr(make_parser(words).parse_args(words), name) == 120 << 20
    words = ["rig", "lab", "--workers", f"{size},1G"]
    assert make_parser(words).parse_args(words).workers == (120 << 20, 1 << 30)
    for cap, device in ((size, ""), (f"CUDA0={size}", "CUDA0")):
        words = ["rig", "serve", "--port", "1", "--cap", cap]
        assert make_parser(words).parse_args(words).cap == [(device, 120 << 20)]
    words = ["plan", "m.gguf", "--margin", f"CUDA0={size}"]
    assert make_parser(words).parse_args(words).margin == [("CUDA0", 120 << 20)]
