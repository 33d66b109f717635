"""`serve` in a process of its own: events, refusals and ending."""

from __future__ import annotations

import datetime
import http.client
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.support.command_line import ROOT, program, run_here
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.pictures import picture
from tests.support.side_models import write_tiny_ear, write_tiny_projector
from tests.support.sounds import tone

pytestmark = pytest.mark.program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    for name in ("first", "second"):
        write_tiny_llama(made / f"{name}.gguf", n_layers=2)
    return made


@contextmanager
def serving(tmp_path: Path, *words: str | Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the command until it serves; the port it got."""
    environment = {
        **os.environ,
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    with subprocess.Popen(
        [*program(), "serve", *map(str, words), "--port", "0", "--json"],
        cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            yield process, event(process, "serving")["port"]
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(DEADLINE_S)


def event(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """Return the next event with this name."""
    assert process.stdout is not None
    for line in process.stdout:
        document = json.loads(line)
        assert isinstance(document, dict)
        if document["event"] == name:
            return document
    assert process.stderr is not None
    pytest.fail(process.stderr.read())


def post(port: int, path: str, document: object, key: str = "") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("POST" if document is not None else "GET", path, json.dumps(document), headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def ask(port: int, model: str, key: str = "") -> tuple[int, Any]:
    asked = {"model": model, "messages": [{"role": "user", "content": "A secret"}], "max_tokens": 2}
    return post(port, "/v1/chat/completions", asked, key)


def test_named_models_are_loaded_and_the_library_follows(folder: Path, tmp_path: Path) -> None:
    with serving(tmp_path, folder / "first.gguf", "--models", folder, "--parallel", "2", "--ctx", "512") as (
        process,
        port,
    ):
        assert event(process, "loaded")["model"] == "first"
        assert ask(port, "")[1]["model"] == "first"
        status, document = ask(port, "second.gguf")
        assert (status, document["model"]) == (200, "second")
        told = event(process, "request")
        assert (told["model"], told["status"], told["answer_tokens"]) == ("first", 200, 2)
        assert "secret" not in json.dumps(told)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        psutil.wait_procs(children, DEADLINE_S)
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    log = "".join(path.read_text() for path in tmp_path.rglob("*.log"))
    assert "secret" not in log


def test_only_what_is_named_and_only_with_the_key(folder: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    words: list[str | Path] = [
        folder / "first.gguf",
        "--models",
        folder,
        "--only",
        "--api-key-file",
        key_file,
        "--ctx",
        "256",
    ]
    with serving(tmp_path, *words) as (_, port):
        key = key_file.read_text().strip()
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        assert ask(port, "first")[0] == 401
        assert ask(port, "first", key)[0] == 200
        assert ask(port, "second", key)[0] == 404


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--host", "0.0.0.0", "--api-key-file", "KEY"], "--plain-http"),
        (["--tls-cert", "a.pem"], "belong together"),
        (["--allow-origin", "*"], "not an origin"),
        (["--allow-origin", "http://localhost:3000/path"], "not an origin"),
        (["--allow-host", "box.example:8080"], "not a host name"),
        (["--alias", "coder"], "NAME=FILE"),
        (["--alias", "coder=nowhere", "--only"], "is neither a file nor a model"),
        (["--alias", "a\nb=c"], "on one line"),
        (["--keep-alive", "soon"], "--keep-alive"),
        (["--api-key-file", "SHORT"], "is not a key"),
        (["--api-key-file", "EMPTY"], "contains no key"),
        (["--api-key-file", "SPACE"], "is not a key"),
        (["--port", "99999"], "not a port"),
        (["--models", "nowhere"], "nowhere"),
        (["no-such-model"], "no-such-model"),
        (["--layout", "a.json"], "name one"),
        (["--auto", "fewest", "--layout", "a.json", "a"], "--auto and --layout exclude each other"),
        (["--layers", "CUDA0=1", "--layout", "a.json", "a"], "--layers and --layout exclude each other"),
        (["--device", "CPU", "--layout", "a.json", "a"], "--device and --layout exclude each other"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    keys = {"KEY": "k" * 32, "SHORT": "abc", "EMPTY": "# nothing\n\n", "SPACE": "a key with a\nnewline in it"}
    for name, text in keys.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    answer = run_here(capsys, "serve", *(str(tmp_path / word) if word in keys else word for word in words))
    assert answer.code == 2
    assert said in answer.err


def test_names_of_the_user_and_https(folder: Path, tmp_path: Path) -> None:
    settings = tmp_path / "config" / "layerdeck"
    settings.mkdir(parents=True)
    kept = {"version": 1, "aliases": {"kept": str(folder / "second.gguf")}, "models": {"kept": {"keep_alive": "20m"}}}
    (settings / "serve.json").write_text(json.dumps(kept))
    certificate, key = write_certificate(tmp_path)
    words: list[str | Path] = ["--only", "--alias", f"coder={folder / 'first.gguf'}", "--ctx", "256"]
    with serving(tmp_path, *words, "--tls-cert", certificate, "--tls-key", key) as (_, port):
        context = ssl.create_default_context(cafile=str(certificate))

        def ask_safely(path: str, document: object) -> Any:
            connection = http.client.HTTPSConnection("localhost", port, timeout=DEADLINE_S, context=context)
            try:
                connection.request("POST" if document else "GET", path, json.dumps(document))
                return json.loads(connection.getresponse().read())
            finally:
                connection.close()

        for name, id in (("coder", "first"), ("kept", "second")):
            asked = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            assert ask_safely("/v1/chat/completions", asked)["model"] == id
        # An answer may be there a moment before its request has ended.
        while any(each["requests"] for each in ask_safely("/v1/layerdeck/status", None)["models"].values()):
            pass
        models = ask_safely("/v1/layerdeck/status", None)["models"]
        assert 0 < models["first"]["unload_in_s"] <= 300 < models["second"]["unload_in_s"] <= 1200
        assert "coder" in ask_safely("/v1/models/first", None)["names"]


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate for localhost, signed by itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_path, key_path = folder / "certificate.pem", folder / "key.pem"
    certificate_path.write_bytes(made.public_bytes(Encoding.PEM))
    key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return certificate_path, key_path


def test_settings_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "layerdeck").mkdir()
    (tmp_path / "layerdeck" / "serve.json").write_text('{"version": 1, "keep_alive": "soon"}')
    answer = run_here(capsys, "serve", "--only")
    assert answer.code == 2
    assert "serve.json: keep_alive" in answer.err


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = run_here(capsys, "serve", "--only", "--port", str(taken.getsockname()[1]))
    assert answer.code == 2
    assert "another program uses this port" in answer.err


@pytest.mark.exhaustive
def test_images_and_sound_come_as_data(folder: Path, tmp_path: Path) -> None:
    cases: list[tuple[Path, dict[str, Any]]] = [
        (
            write_tiny_projector(tmp_path / "eye.gguf"),
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(picture()).decode()}"}},
        ),
        (
            write_tiny_ear(tmp_path / "ear.gguf"),
            {"type": "input_audio", "input_audio": {"data": b64encode(tone()).decode(), "format": "wav"}},
        ),
    ]
    for projector, part in cases:
        words: list[str | Path] = [folder / "first.gguf", "--only", "--ctx", "2048", "--mmproj", projector]
        with serving(tmp_path, *words) as (_, port):
            text = {"type": "text", "text": "What is this?"}
            asked = {"messages": [{"role": "user", "content": [text]}], "max_tokens": 2}
            _, without = post(port, "/v1/chat/completions", asked)
            asked["messages"] = [{"role": "user", "content": [part, text]}]
            status, document = post(port, "/v1/chat/completions", asked)
            assert status == 200, document
            assert document["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"]


def test_a_model_without_a_projector_says_so(folder: Path, tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(picture()).decode()}"}}
    with serving(tmp_path, folder / "first.gguf", "--only", "--ctx", "2048") as (_, port):
        asked = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        status, document = post(port, "/v1/chat/completions", asked)
    assert status == 400
    assert "no projector" in document["error"]["message"]
