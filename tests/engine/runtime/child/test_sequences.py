"""Saved sequences: continued in any layout of the same model; other files are refused."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine.base.units import MIB
from engine.devices.host_memory import HostMemory
from engine.planning.layout.engine_parameters import EngineParameters
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.planning.settings.table import SETTINGS
from engine.runtime.child.generate import saved_kv_state
from engine.runtime.child.generate.checkpoints import Checkpoint
from engine.runtime.child.generate.saved_kv_state import (
    ModelIdentity,
    SequenceFileError,
    SequenceHeader,
    SequenceReader,
    StoredCheckpoint,
    write_sequence,
)
from engine.runtime.child.generate.slots import Slots
from engine.runtime.child.handlers import saved_kv_states
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.native.failures import RequestError
from engine.runtime.protocol.messages import (
    Failure,
    Generated,
    LoadedModel,
    Piece,
    Reading,
    Saving,
    SequenceRestored,
    SequenceSaved,
)
from engine.runtime.protocol.requests import DeviceRef, Generate, Load, RestoreSequence, SaveSequence, Stop, Tokenise
from tests.engine.runtime.child.raw_child import RawChild, endless, entries, rpc_workers
from tests.support.kept_models import write_kept_model
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.setting_values import others

CONTEXT = ContextSettings(n_ctx=1024, n_ubatch=64, n_seq_max=2, threads=1)
BEGINNING = "A conversation that was long enough to be worth keeping. " * 3
PREFIX = struct.Struct("<4sII")


def load(
    child: RawChild,
    path: Path,
    context: ContextSettings = CONTEXT,
    parameters: EngineParameters | None = None,
    devices: tuple[DeviceRef, ...] = (),
) -> None:
    answer = child.ask(Load(path=str(path), devices=devices, parameters=parameters or entries(), context=context))
    assert isinstance(answer, LoadedModel), answer


def generate(child: RawChild, number: int, prompt: str, max_tokens: int = 24) -> tuple[str, Generated]:
    child.send(Generate(id=number, prompt=prompt, max_tokens=max_tokens, temperature=0.0))
    said = child.last_words(number)[number]
    assert isinstance(said[-1], Generated), said[-1]
    return "".join(message.text for message in said if isinstance(message, Piece)), said[-1]


def save(child: RawChild, path: Path, of: int) -> SequenceSaved:
    answer = child.ask(SaveSequence(id=900 + of, path=str(path), of=of))
    assert isinstance(answer, SequenceSaved), answer
    return answer


def refused(child: RawChild, path: Path, kind: str = "argument") -> str:
    answer = child.ask(RestoreSequence(id=800, path=str(path)))
    assert isinstance(answer, Failure), answer
    assert (answer.kind, answer.request) == (kind, 800)
    return answer.message


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=4)


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "conversation.sequence"
    with RawChild() as child:
        load(child, model)
        generate(child, 1, BEGINNING)
        save(child, path, 1)
    return path


def test_a_sequence_goes_on_in_another_layout(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "conversation.sequence"
    with RawChild() as child:
        load(child, model)
        answer, _ = generate(child, 1, BEGINNING)
        told = save(child, path, 1)
        assert told.tokens == len(BEGINNING) + 1 + 23
        assert told.size_bytes == path.stat().st_size
        whole, fresh = generate(child, 2, f"{BEGINNING} And so it goes on", 24)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]  # nothing is left of the writing
    assert fresh.cached_tokens == len(BEGINNING) + 1
    again = tmp_path / "again.sequence"
    with rpc_workers(None, None) as (_, refs):
        for parameters in (entries(("W0", 3), ("W1", 2)), entries(("W1", 2), ("CPU", 1), ("W0", 2))):
            with RawChild() as child:
                load(child, model, CONTEXT, parameters, refs)
                restored = child.ask(RestoreSequence(id=7, path=str(path)))
                assert restored == SequenceRestored(request=7, tokens=told.tokens)
                text, end = generate(child, 8, f"{BEGINNING} And so it goes on", 24)
                assert end.cached_tokens == len(BEGINNING) + 1
                readings = [message for message in child.heard if isinstance(message, Reading)]
                assert {reading.cached_tokens for reading in readings} == {end.cached_tokens}
                assert text == whole
                restored_again, end = generate(child, 9, BEGINNING)
                assert restored_again == answer
                save(child, again, 9)
    with RawChild() as child:
        load(child, model)
        assert isinstance(child.ask(RestoreSequence(id=7, path=str(again))), SequenceRestored)
        assert generate(child, 8, BEGINNING)[0] == answer


@pytest.mark.parametrize("name", ["gemma3-dense", "mamba-dense", "jamba-dense"])
def test_windows_and_recurrent_state_are_kept_too(tmp_path: Path, name: str) -> None:
    path = write_kept_model(tmp_path / "model.gguf", name)
    with RawChild() as child:
        load(child, path)
        generate(child, 1, BEGINNING, 1)
        # what was chosen last is not in the cache: the same prompt and one more token go on
        more = f"{BEGINNING}Well"
        whole, _ = generate(child, 2, more)
        generate(child, 3, BEGINNING, 1)
        save(child, tmp_path / "s", 3)
    with RawChild() as child:
        load(child, path)
        assert isinstance(child.ask(RestoreSequence(id=1, path=str(tmp_path / "s"))), SequenceRestored)
        text, end = generate(child, 2, more)
        assert end.cached_tokens == len(BEGINNING) + 1
        assert text == whole


@pytest.mark.parametrize("name", ["gemma3-dense", "mamba-dense", "jamba-dense"])
def test_models_of_other_memories_answer_several_at_once(tmp_path: Path, name: str) -> None:
    path = write_kept_model(tmp_path / "model.gguf", name)
    prompts = ("Once", BEGINNING, "word " * 30)
    with RawChild() as child:
        load(child, path, msgspec.structs.replace(CONTEXT, n_ctx=1536, n_seq_max=3))
        texts = [generate(child, number, prompt)[0] for number, prompt in enumerate(prompts, start=1)]
        for number, prompt in enumerate(prompts, start=11):
            child.send(Generate(id=number, prompt=prompt, max_tokens=24, temperature=0.0))
        child.send(Generate(id=14, prompt="Stopped on its way", temperature=1.0, min_p=0.0, seed=1))
        child.send(Stop(request=14))
        said = child.last_words(11, 12, 13, 14)
        for number, text in zip((11, 12, 13), texts, strict=True):
            assert "".join(message.text for message in said[number] if isinstance(message, Piece)) == text
        # the whole of a conversation lends itself as a beginning, to another slot as well
        for number, ending in ((21, " One."), (22, " Two.")):
            child.send(Generate(id=number, prompt=f"{BEGINNING}{ending}", max_tokens=8, temperature=0.0))
        together = child.last_words(21, 22)
        for number, ending in ((21, " One."), (22, " Two.")):
            text = "".join(message.text for message in together[number] if isinstance(message, Piece))
            child.ask(Generate(id=30 + number, prompt="?" * 200, max_tokens=1))
            assert generate(child, 40 + number, f"{BEGINNING}{ending}", 8)[0] == text


def test_what_does_not_suit_is_refused_with_a_reason(model: Path, saved: Path, tmp_path: Path) -> None:
    rare = [setting for setting in SETTINGS if setting.in_kv_state and setting.rare]
    other = write_tiny_llama(tmp_path / "other.gguf", n_layers=2)
    for path, context, words in (
        (other, CONTEXT, "another model"),
        (model, msgspec.structs.replace(CONTEXT, type_k="f32", type_v="f32"), "Load with the same KV types"),
        (model, msgspec.structs.replace(CONTEXT, n_seq_max=4), "separate sequences"),
        (model, msgspec.structs.replace(CONTEXT, flash_attn="off"), "flash attention"),
        (model, msgspec.structs.replace(CONTEXT, swa_full=True), "swa_full"),
        *((model, msgspec.structs.replace(CONTEXT, **{each.key: others(each)[0]}), each.key) for each in rare),
    ):
        with RawChild() as child:
            load(child, path, context)
            assert words in refused(child, saved, "model_file" if path is other else "argument")
            assert generate(child, 1, "still there", 2)[1].stop_reason == "length"
    short = msgspec.structs.replace(CONTEXT, n_ctx=512)
    long = tmp_path / "long.sequence"
    with RawChild() as child:
        load(child, model)
        generate(child, 1, BEGINNING * 2, 2)
        save(child, long, 1)
    with RawChild() as child:
        load(child, model, short)
        assert "longer context" in refused(child, long)


def test_each_setting_of_rope_computes_other_probabilities(model: Path) -> None:
    sampling = SamplingSettings(temperature=0.0, alternatives=5)
    found = []
    scaled = msgspec.structs.replace(CONTEXT, rope_freq_scale=0.25)
    yarn = msgspec.structs.replace(scaled, rope_scaling="yarn")
    of_less = msgspec.structs.replace(yarn, yarn_orig_ctx=64)
    for context in (CONTEXT, msgspec.structs.replace(CONTEXT, rope_freq_base=500.0), scaled, yarn, of_less):
        with RawChild() as child:
            load(child, model, context)
            child.send(Generate(id=1, prompt=BEGINNING, max_tokens=1, sampling=sampling))
            said = child.last_words(1)[1]
            found.append([choice.likeliest for each in said if isinstance(each, Piece) for choice in each.choices])
    assert all(found)
    assert len(set(map(str, found))) == len(found)


def _with_header(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    magic, version, length = PREFIX.unpack_from(data)
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    change(header)
    text = json.dumps(header).encode()
    return PREFIX.pack(magic, version, len(text)) + text + data[PREFIX.size + length :]


def test_damaged_files_are_refused_and_the_model_stays(model: Path, saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    cases = {
        "empty": (b"", "not a saved KV state"),
        "garbage": (b"GGUF" + bytes(5000), "not a saved KV state"),
        "short": (whole[: len(whole) // 2], "damaged"),
        "long": (whole + b"x", "damaged"),
        "flipped": (bytes(flipped), "damaged"),
        "cut header": (whole[:40], "damaged"),
        "version": (PREFIX.pack(b"LDSQ", 9, 4) + whole[12:], "version 9"),
        "huge header": (PREFIX.pack(b"LDSQ", 1, 1 << 31) + whole[12:], "damaged"),
        "no tokens": (_with_header(whole, lambda header: header.update(tokens=0)), "damaged"),
        "many tokens": (_with_header(whole, lambda header: header.update(tokens=1 << 60)), "damaged"),
        "odd header": (_with_header(whole, lambda header: header.update(more=1)), "damaged"),
    }
    with RawChild() as child:
        load(child, model)
        text, _ = generate(child, 1, BEGINNING)
        for name, (data, words) in cases.items():
            path = tmp_path / name
            path.write_bytes(data)
            message = refused(child, path, "model_file")
            assert words in message, (name, message)
            assert path.name in message
        assert "No such file" in refused(child, tmp_path / "missing")
        assert "regular file" in refused(child, tmp_path)
        assert generate(child, 2, BEGINNING)[0] == text


def test_a_state_that_the_engine_does_not_take_costs_nobody_an_answer(model: Path, saved: Path, tmp_path: Path) -> None:
    """A digest is no proof of origin: bytes that were made up reach the engine, which refuses them."""
    whole = saved.read_bytes()
    _, _, length = PREFIX.unpack_from(whole)
    begin = PREFIX.size + length
    header = json.loads(whole[PREFIX.size : begin])
    state_begin = begin + 4 * header["tokens"]
    broken = bytearray(whole)
    broken[state_begin + 8 : state_begin + 12] = struct.pack("<I", 77)  # the number of streams
    digest = hashlib.sha256(broken[begin:]).hexdigest()
    path = tmp_path / "made-up"
    path.write_bytes(_with_header(bytes(broken), lambda header: header.update(digest=digest)))
    with RawChild() as child:
        load(child, model)
        text, _ = generate(child, 1, "Once upon a time", 60)
        child.send(Generate(id=2, prompt="Once upon a time", max_tokens=60, temperature=0.0))
        child.send(RestoreSequence(id=3, path=str(path)))
        said = child.last_words(2, 3)
        assert isinstance(said[3][-1], Failure)
        assert "rejects the state" in said[3][-1].message
        assert "".join(message.text for message in said[2] if isinstance(message, Piece)) == text


def test_only_what_is_cached_and_ended_can_be_saved(model: Path, tmp_path: Path) -> None:
    with RawChild() as child:
        load(child, model)
        unknown = child.ask(SaveSequence(id=1, path=str(tmp_path / "s"), of=5))
        assert isinstance(unknown, Failure)
        assert "cached any more" in unknown.message
        child.send(endless(2, "Hello"))
        while not isinstance(child.message(), Piece):
            pass  # Stopped before its first batch it would have left nothing in the cache.
        child.send(SaveSequence(id=3, path=str(tmp_path / "s"), of=2))
        said = child.last_words(3)[3]
        assert isinstance(said[-1], Failure)
        child.send(Stop(request=2))
        child.last_words(2)
        answer = child.ask(SaveSequence(id=4, path=str(tmp_path / "no" / "folder"), of=2))
        assert isinstance(answer, Failure)
        assert "cannot be written" in answer.message
        assert isinstance(child.ask(SaveSequence(id=5, path=str(tmp_path / "s"), of=2)), SequenceSaved)


HEADER = SequenceHeader(
    model=ModelIdentity(
        description="", architecture="", n_layer=1, n_embd=1, n_vocab=9, n_params=1, size_bytes=1, metadata=""
    ),
    type_k="f16",
    type_v="f16",
    swa_full=False,
    streams=1,
    flash_attention=None,
    tokens=3,
    state_bytes=10,
    digest="",
    checkpoints=(StoredCheckpoint(2, 5),),
)


def test_a_state_is_written_and_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_kv_state, "PIECE_BYTES", 4)
    states = [memoryview(bytes(range(10))), memoryview(b"later")]
    told: list[None] = []

    def header(digest: str) -> SequenceHeader:
        assert len(told) == 5  # 4, 4 and 2 bytes of the state, 4 and 1 of the checkpoint
        return msgspec.structs.replace(HEADER, digest=digest)

    write_sequence(tmp_path / "s", [1, 2, 3], states, header, lambda: told.append(None))
    assert len(told) == 10
    reader = SequenceReader(tmp_path / "s")
    assert reader.header().tokens == 3
    *pieces, content = reader.content()
    assert pieces == [None] * 5
    assert content == ([1, 2, 3], bytearray(states[0]), [(2, bytearray(states[1]))])


def test_restoring_is_done_in_parts_between_which_it_may_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_kv_state, "PIECE_BYTES", 4)
    monkeypatch.setattr(saved_kv_states, "SLICE_S", 0.0)
    states = [memoryview(bytes(range(10))), memoryview(b"later")]
    write_sequence(tmp_path / "s", [1, 2, 3], states, lambda digest: msgspec.structs.replace(HEADER, digest=digest))
    loaded = cast("LoadedContext", SimpleNamespace(vocabulary_size=0))
    request = RestoreSequence(id=1, path=str(tmp_path / "s"))
    task = saved_kv_states.RestoreTask(loaded, request, SequenceReader(tmp_path / "s"), ())
    slots = cast("Slots", None)
    assert [task.run_slice(slots) for _ in range(5)] == [None] * 5
    with pytest.raises(RequestError, match="tokens that the model does not have"):
        task.run_slice(slots)


def test_a_save_tells_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, reached = threading.Event(), threading.Event()

    def write(*parts: Any) -> int:
        for _ in range(3):  # the digest took both pieces, and the disk the first
            parts[-1]()
        reached.set()
        go_on.wait(DEADLINE_S)
        return 1

    monkeypatch.setattr(saved_kv_states, "write_sequence", write)
    monkeypatch.setattr(saved_kv_states, "PIECE_BYTES", 8)
    request = SaveSequence(id=1, path=str(tmp_path / "s"), of=0)
    task = saved_kv_states.SaveTask(request, [], [memoryview(bytes(16))], HEADER)
    assert reached.wait(DEADLINE_S)
    assert task.reading == Saving(request=1, saved_bytes=12, size_bytes=16)
    go_on.set()
    task._thread.join()


def test_a_disk_that_does_not_answer_ends_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    written = []

    def write(*parts: Any) -> None:
        answers.wait()
        parts[-1]()
        written.append(parts)

    monkeypatch.setattr(saved_kv_states, "write_sequence", write)
    monkeypatch.setattr(saved_kv_states, "SILENT_S", 0.0)
    slots = cast("Slots", SimpleNamespace(all=(), holding=lambda _of: SimpleNamespace(taken=False, exact=None)))
    request = SaveSequence(id=1, path=str(tmp_path / "s"), of=0)
    task = saved_kv_states.SaveTask(request, [], [], HEADER)
    try:
        with pytest.raises(RequestError, match="the disk does not answer"):
            task.run_slice(slots)
        # The thread holds the state until the disk answers, so that another save would take further memory.
        with pytest.raises(RequestError, match="the disk does not answer"):
            saved_kv_states.begin_saving(cast("LoadedContext", None), slots, request)
    finally:
        answers.set()
        for thread in saved_kv_states._hung:
            thread.join()
        saved_kv_states._hung.clear()
    assert not written, "a save that was reported as failed goes on"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a running process")
def test_a_state_for_which_host_memory_is_short_is_refused_and_the_model_stays(tmp_path: Path) -> None:
    import resource

    # 32 KiB of KV cache for each token, so 64 MiB.
    shape = {"n_layers": 8, "n_embd": 512, "n_head": 8, "n_head_kv": 8, "n_ff": 64}
    path = write_tiny_llama(tmp_path / "model.gguf", **shape)  # type: ignore[arg-type]
    with RawChild() as child:
        load(child, path, ContextSettings(n_ctx=2304, threads=1, type_k="f32", type_v="f32", flash_attn="off"))
        generate(child, 1, "word " * 400, 1)
        assert save(child, tmp_path / "s", 1).size_bytes > 48 * MIB
        child.ask(Tokenise(text=""))  # so that the state of the save is freed
        pages = int(Path(f"/proc/{child.process.pid}/statm").read_text().split()[0])
        limit_bytes = pages * resource.getpagesize() + 32 * MIB
        resource.prlimit(child.process.pid, resource.RLIMIT_AS, (limit_bytes, limit_bytes))
        answer = child.ask(SaveSequence(id=2, path=str(tmp_path / "other"), of=1))
        assert isinstance(answer, Failure)
        assert (answer.kind, "memory is too short" in answer.message) == ("argument", True)
        assert "memory is too short" in refused(child, tmp_path / "s")
        generate(child, 3, "word", 2)


def test_a_save_is_refused_before_the_free_memory_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_kv_states, "read_host_memory", lambda: HostMemory(64 * MIB, 4 * MIB))
    low = SimpleNamespace(llama_state_seq_get_size=lambda *_: 5 * MIB)
    loaded = cast("LoadedContext", SimpleNamespace(engine=SimpleNamespace(low=low), context=0))
    slot = SimpleNamespace(number=0, taken=False, exact=None, checkpoints=[])
    slots = cast("Slots", SimpleNamespace(holding=lambda _of: slot))
    with pytest.raises(RequestError, match=r"takes 5\.0 MiB of host memory, but 4\.0 MiB are free"):
        saved_kv_states.begin_saving(loaded, slots, SaveSequence(path="s", of=0))


def test_a_state_above_the_limit_of_its_request_is_refused_before_it_is_copied() -> None:
    low = SimpleNamespace(llama_state_seq_get_size=lambda *_: 5 * MIB)
    loaded = cast("LoadedContext", SimpleNamespace(engine=SimpleNamespace(low=low), context=0))
    slot = SimpleNamespace(number=0, taken=False, exact=None, checkpoints=[Checkpoint(1, memoryview(bytes(MIB)))])
    slots = cast("Slots", SimpleNamespace(holding=lambda _of: slot))
    with pytest.raises(RequestError, match=r"has 6\.0 MiB, and the limit for saved KV states is 5\.0 MiB") as refused:
        saved_kv_states.begin_saving(loaded, slots, SaveSequence(path="s", of=0, most_bytes=5 * MIB))
    message = refused.value.message_for(0)
    assert isinstance(message, Failure)
    assert message.kind == "does_not_fit"


def test_a_disk_that_cannot_read_a_state_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.state"
    path.write_bytes(b"x")

    class Faulty(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", lambda *_: Faulty())
    with pytest.raises(SequenceFileError, match=r"s\.state cannot be read: Input/output error"):
        SequenceReader(path).header()
