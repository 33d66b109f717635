"""Saved KV states: found in any layout of the same model, within a quota, the least recently used removed first."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import pytest

from engine.base.errors import ChatError
from engine.chat.saved_kv_states import SUFFIX, KvStateKey, SavedKvStates, key_of, model_identity
from engine.model.gguf.reader import read_model
from engine.planning.memory.side_files import Adapter
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.table import SETTINGS, Setting
from engine.runtime.protocol.messages import Generated, LoadedModel, SequenceRestored, SequenceSaved
from engine.runtime.protocol.requests import Generate, Load, RestoreSequence, SaveSequence
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.models import write_tiny_llama
from tests.support.setting_values import others

KEY = KvStateKey("model", ("f16", "f16", "False"), streams=1)


def write(states: SavedKvStates, conversation: str, size_bytes: int, used_ns: int) -> Path:
    states.make_folder()
    path = states.path_for(conversation, KEY)
    path.write_bytes(bytes(size_bytes))
    states.keep(path)
    if path.exists():
        os.utime(path, ns=(used_ns, used_ns))
    return path


def test_the_longest_unused_goes_first(tmp_path: Path) -> None:
    states = SavedKvStates(tmp_path / "states", quota_bytes=250)
    paths = [write(states, f"c{number}", 100, number) for number in range(2)]
    assert states.find("c0", KEY) == paths[0]  # used now
    write(states, "c2", 100, 5)
    assert sorted(states.sizes()) == ["c0", "c2"]
    assert states.size_bytes == 200
    assert states.find("c1", KEY) is None
    states.set_quota(150)
    assert states.size_bytes == 100
    states.empty()
    assert states.sizes() == {}


def test_what_alone_is_beyond_the_quota_is_not_kept(tmp_path: Path) -> None:
    states = SavedKvStates(tmp_path, quota_bytes=100)
    small = write(states, "small", 60, 1)
    large = write(states, "large", 101, 2)
    assert not large.exists()
    assert small.exists()


def test_each_conversation_and_model_has_its_own(tmp_path: Path) -> None:
    states = SavedKvStates(tmp_path)
    path = write(states, "a", 1, 1)
    write(states, "ab", 1, 1)
    other = KvStateKey("model", ("q8_0", "f16", "False"), streams=1)
    assert states.find("a", other) is None
    assert states.find("a", KEY) == path
    states.forget_conversation("a")
    assert list(states.sizes()) == ["ab"]


def test_files_are_found_under_the_names_of_earlier_versions() -> None:
    settings = ContextSettings(type_k="q8_0", type_v="q8_0", n_seq_max=2)
    adapters = (Adapter(Path("/a.gguf"), (), 0.5), Adapter(Path("/b.gguf"), ()))
    for key, text in (
        (key_of("model", settings), "model|q8_0|q8_0|False|2"),
        (key_of("model", settings, adapters), "model|q8_0|q8_0|False|2|/a.gguf*0.5|/b.gguf*1"),
    ):
        assert key.name == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("setting", [each for each in SETTINGS if each.in_kv_state], ids=lambda each: each.key)
def test_another_value_of_a_setting_that_the_cache_depends_on_is_another_state(setting: Setting) -> None:
    usual = ContextSettings()
    changed = msgspec.structs.replace(usual, **{setting.key: others(setting)[0]})
    assert key_of("model", changed).name != key_of("model", usual).name
    assert key_of("model", changed).name == key_of("model", msgspec.structs.replace(changed, threads=2)).name


@pytest.mark.parametrize("conversation", ["../../x", "a/b", "", "a" * 300, "é", "."])
def test_no_name_leaves_the_folder(tmp_path: Path, conversation: str) -> None:
    states = SavedKvStates(tmp_path / "states")
    path = write(states, conversation, 1, 1)
    assert path.parent == tmp_path / "states"
    assert states.find(conversation, KEY) == path


def test_other_files_there_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    states = SavedKvStates(tmp_path, quota_bytes=0)
    states.empty()
    assert (tmp_path / "notes.txt").exists()
    assert states.size_bytes == 0


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ChatError, match="states are not saved"):
        SavedKvStates(tmp_path / "file" / "states").make_folder()


def test_a_model_is_the_same_wherever_its_file_is(tmp_path: Path) -> None:
    one = write_tiny_llama(tmp_path / "one.gguf", n_layers=2)
    same = tmp_path / "same.gguf"
    same.write_bytes(one.read_bytes())
    other = write_tiny_llama(tmp_path / "other.gguf", n_layers=3)
    identities = [model_identity(read_model(path)) for path in (one, same, other)]
    assert identities[0] == identities[1] != identities[2]


def test_a_conversation_goes_on_in_another_layout_without_being_read_again(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=4)
    context = ContextSettings(n_ctx=512, threads=1)
    states, key = SavedKvStates(tmp_path / "states"), key_of(model_identity(read_model(model)), context)
    prompt = "A conversation that is long enough to be kept. " * 3
    with RawChild() as child:
        loaded = child.ask(Load(path=str(model), devices=(), parameters=entries(), context=context))
        assert isinstance(loaded, LoadedModel)
        child.send(Generate(id=1, prompt=prompt, max_tokens=4, temperature=0.0))
        assert isinstance(child.last_words(1)[1][-1], Generated)
        states.make_folder()
        path = states.path_for("c", key)
        assert isinstance(child.ask(SaveSequence(id=2, path=str(path), of=1)), SequenceSaved)
        states.keep(path)
    with rpc_workers(None) as (_workers, devices), RawChild() as child:
        parameters = entries(("W0", 3))
        loaded = child.ask(Load(path=str(model), devices=devices, parameters=parameters, context=context))
        assert isinstance(loaded, LoadedModel)
        again = key_of(model_identity(read_model(model)), msgspec.structs.replace(context, threads=2))
        found = states.find("c", again)
        assert found is not None
        assert found.suffix == SUFFIX
        assert isinstance(child.ask(RestoreSequence(id=1, path=str(found))), SequenceRestored)
        child.send(Generate(id=2, prompt=prompt + "More.", max_tokens=1, temperature=0.0))
        done = child.last_words(2)[2][-1]
        assert isinstance(done, Generated)
        assert done.cached_tokens > len(prompt)
