"""Every JSON file that we read, with changed values, keys and lists: its content, or one error."""

from __future__ import annotations

import json
import random
import struct
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.cli.load import prompts_of
from app.run_records import VERSION, OpenedModel, RunRecord, RunRecords
from app.settings import Settings, StoredSideFiles
from engine.base.errors import EngineError
from engine.base.texts import MAX_SENTENCE
from engine.base.weight_cache import _read_list
from engine.devices.rig_file import encode_rig, parse_rig
from engine.library.downloads.job import Job, JobState, QueueFile
from engine.library.downloads.queue import read_jobs
from engine.machines.rigs.self_test import read_verdicts
from engine.machines.tunnel.pairings import PairingStore
from engine.planning.fit.calibration import read_calibration
from engine.planning.fit.speed_book import read_speed_book
from engine.planning.layout.layout_file import encode_layout, parse_layout
from engine.runtime.child.generate.saved_kv_state import MAGIC, TOKEN_BYTES, VERSIONS, SequenceFileError, SequenceReader
from engine.runtime.protocol.network import TransferFile
from tests.support.mutation import mutate_json
from tests.support.selection import examples

RIG = {
    "version": 1,
    "devices": [
        {"id": "CUDA0", "name": "RTX", "backend": "CUDA", "total_bytes": "24GiB", "free_bytes": 1 << 30, "kind": "gpu",
         "pci_bus_id": "0000:01:00.0", "cap_bytes": None, "margin_bytes": "512MiB",
         "capabilities": {"row_split": False, "tensor_split": True}},
        {"id": "RPC0", "backend": "RPC", "endpoint": "192.0.2.1:50052", "endpoint_device": 0, "total_bytes": "8GiB"},
    ],
    "host": {"name": "h", "total_bytes": "64GiB", "free_bytes": "50GiB"},
}  # fmt: skip
LAYOUT = {
    "version": 1, "model": {"name": "m", "layers": 8}, "split_mode": "layer",
    "runs": [{"device": "CUDA0", "layers": "0-3"}, {"device": "CPU", "layers": "4-7"}], "output": "CPU",
    "overrides": [
        {"part": "experts", "layers": "1-2", "device": "CPU"},
        {"pattern": "blk\\.0\\.ffn_.*", "device": "CPU"},
    ],
    "context": {"n_ctx": 8192, "type_k": "f16", "flash_attn": "auto", "offload_kqv": True, "threads": None},
}  # fmt: skip
SPLIT = {
    "version": 1, "model": {"layers": 8}, "split_mode": "tensor", "runs": [{"device": "A", "layers": "0-7"}],
    "tensor_split": {"A": 3, "B": 1},
}  # fmt: skip
CALIBRATION = {"version": 1, "overhead_bytes": {"CUDA a": [1, 2]}}
SPEEDS = {
    "version": 1, "answers": [{"layout_class": "a", "parts": {"CUDA a": 0.1}, "seconds": 0.2}],
    "devices": {"CUDA a": {"read_bytes_per_second": 1e9, "round_trip_s": 1e-4, "sent_bytes_per_second": 1e9}},
}  # fmt: skip
VERDICTS = {"version": 1, "passed": {"CUDA 1": True}}
PAIRINGS = {
    "version": 1,
    "pairings": [
        {"role": "server", "name": "attic", "certificate": "YWJj", "endpoint": "192.0.2.1:50052", "paired_s": 1},
        {"role": "client", "name": "laptop", "certificate": "eHl6"},
    ],
}
DOWNLOADS = msgspec.to_builtins(
    QueueFile(
        jobs=(
            Job(
                id="1", title="m", files=(TransferFile(url="https://192.0.2.1/m.gguf", target="/m/m.gguf"),),
                refs=(("/m/ref", "abc"),), state=JobState.PAUSED, done_bytes=3, paths=("/m/m.gguf",),
            ),
        )
    )
)  # fmt: skip
RUN = msgspec.to_builtins(RunRecord(VERSION, "0:0.00", (OpenedModel("/m.gguf", "{}"),), restored=True))
KEPT_WEIGHTS = {"0123456789abcdef": 5, "0123456789abcde0": 7}
STATE = {
    "model": {"description": "m", "architecture": "llama", "n_layer": 1, "n_embd": 1, "n_vocab": 1, "n_params": 1,
              "size_bytes": 1, "metadata": ""},
    "type_k": "f16", "type_v": "f16", "swa_full": False, "streams": 1, "flash_attention": None, "tokens": 2,
    "state_bytes": 10, "digest": "", "checkpoints": [[1, 5]], "images": ["a"],
}  # fmt: skip
RECENT = [{"path": "/m.gguf", "title": "M", "detail": ""}]
SIDE_FILES = {"/m.gguf": {"projector": "/p", "device": "CPU", "adapters": [{"path": "/a", "scale": 1.0}]}}


def mutated(document: Any, seed: int) -> bytes:
    """Return a changed document as JSON; one in ten is not even that."""
    numbers = random.Random(seed)
    for _ in range(numbers.randrange(1, 4)):
        document = mutate_json(document, numbers)
    data = json.dumps(document, ensure_ascii=numbers.random() < 0.5).encode("utf-8", "surrogatepass")
    if numbers.random() < 0.1:
        place = numbers.randrange(len(data) + 1)
        data = data[:place] + numbers.randbytes(numbers.randrange(4)) + data[place + numbers.randrange(4) :]
    return data


@pytest.mark.parametrize(
    ("document", "read", "write"),
    [
        (RIG, parse_rig, encode_rig),
        (LAYOUT, parse_layout, encode_layout),
        (SPLIT, parse_layout, encode_layout),
    ],
)
def test_what_people_edit_is_read_or_refused_with_a_sentence(
    document: Any, read: Callable[..., Any], write: Callable[[Any], bytes]
) -> None:
    read(json.dumps(document))
    n_read = 0
    for seed in range(examples(8000)):
        data = mutated(document, seed)
        try:
            found = read(data, source="x.json")
        except EngineError as error:
            sentence = error.summary()
            assert sentence.isprintable(), (seed, data)
            assert 0 < len(sentence) <= MAX_SENTENCE, (seed, data)
        else:
            assert read(write(found)) == found, (seed, data)
            n_read += 1
    assert n_read > 0


@pytest.mark.parametrize(
    ("document", "read"),
    [
        (CALIBRATION, read_calibration),
        (SPEEDS, read_speed_book),
        (VERDICTS, read_verdicts),
        (PAIRINGS, lambda path: [(each.fingerprint, each.words) for each in PairingStore(path).all()]),
        (DOWNLOADS, read_jobs),
        (RUN, lambda path: [run.report for run in RunRecords(path.parent).take_ended()]),
        (KEPT_WEIGHTS, _read_list),
    ],
)
def test_what_we_keep_for_ourselves_is_read_or_forgotten(
    tmp_path: Path, document: Any, read: Callable[[Path], Any]
) -> None:
    path = tmp_path / "kept.json"
    for seed in range(examples(2000)):
        path.write_bytes(mutated(document, seed))
        read(path)


def test_settings_that_were_changed_are_read_or_forgotten(tmp_path: Path) -> None:
    settings = Settings(tmp_path / "layerdeck.ini")
    for seed in range(examples(2000)):
        for key, document in (("recent_models", RECENT), ("side_files", SIDE_FILES), ("own", SIDE_FILES["/m.gguf"])):
            settings.store.setValue(key, mutated(document, seed).decode("utf-8", "replace"))
        for model in settings.recent_models:
            assert isinstance(model.title, str)
        settings.side_files(Path("/m.gguf"))
        settings.kept("own", StoredSideFiles)


def test_prompts_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    for seed in range(examples(1000)):
        path.write_bytes(mutated(["a", "b"], seed))
        with suppress(EngineError):
            prompts_of(Namespace(prompt=None, prompts=path))


def test_the_header_of_a_state_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.state"
    n_read = 0
    for seed in range(examples(2000)):
        header = json.dumps(STATE).encode() if not seed else mutated(STATE, seed)
        path.write_bytes(struct.pack("<4sII", MAGIC, VERSIONS[-1], len(header)) + header + bytes(2 * TOKEN_BYTES + 15))
        with suppress(SequenceFileError):
            n_read += SequenceReader(path).header().is_possible
            list(SequenceReader(path).content())
    assert n_read > 0
