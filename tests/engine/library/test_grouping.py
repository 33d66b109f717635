"""Files grouped into library entries: parts, quantisations, side files and publishers."""

from __future__ import annotations

from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.library.census import FoundFile
from engine.library.entry import Entry
from engine.library.facts import Facts, read_facts
from engine.library.grouping import group, join_parts
from engine.library.scan import scan
from engine.library.stores import Store
from tests.support.stores import adapter_bytes, model_bytes, projector_bytes, put, put_in_hub_cache, put_in_ollama

ROOT = Path("/models")


def found(name: str, *, size_bytes: int = 100, inode: int | None = None, root: Path = ROOT) -> FoundFile:
    path = root / name
    return FoundFile(path, Store("folder", root), path.name, path.parent.name, size_bytes, 1, 1, inode or hash(path))


def entries_in(*stores: Store, reads: bool = True) -> dict[str, Entry]:
    files = scan(stores).files
    facts = {copy.path: read_facts(copy.paths) for copy in join_parts(files)} if reads else {}
    return {entry.title: entry for entry in group(files, facts)}


def labels(entry: Entry) -> list[str]:
    return [each.label for each in entry.quantisations]


def sides(entry: Entry) -> list[str]:
    return [f"{side.role} {side.file.name}" for side in entry.side_files]


def test_quantisations_of_a_model_are_one_entry() -> None:
    files = [found("m/Ada-Q8_0.gguf", size_bytes=200), found("n/ada-q4_k_m.gguf"), found("Bob-Q8_0.gguf")]
    entries = group(files, {})
    assert [(entry.title.casefold(), labels(entry)) for entry in entries] == [
        ("ada", ["Q4_K_M", "Q8_0"]),
        ("bob", ["Q8_0"]),
    ]
    assert entries[0].proposed.label == "Q4_K_M"


def test_names_that_say_nothing_take_their_folder() -> None:
    entries = group([found("Ada-7B/ggml-model-Q4_0.gguf"), found("Bob-7B/model.gguf")], {})
    assert [entry.title for entry in entries] == ["Ada-7B", "Bob-7B"]


def test_headers_part_what_names_join() -> None:
    files = [found("one/chat-Q8_0.gguf"), found("two/chat-Q4_0.gguf"), found("three/chat-Q5_0.gguf")]
    shapes = dict(zip(files, (2, 2, 4), strict=True))
    facts = {file.path: Facts(kind="model", architecture="llama", n_layers=n) for file, n in shapes.items()}
    assert sorted(labels(entry) for entry in group(files, facts)) == [["Q4_0", "Q8_0"], ["Q5_0"]]


def test_parts_are_one_file_and_missing_ones_are_named() -> None:
    whole = [found(f"Ada-Q8_0-0000{number}-of-00003.gguf") for number in (3, 1, 2)]
    torn = [found(f"Bob-Q8_0-0000{number}-of-00003.gguf") for number in (1, 3)]
    ada, bob = group([*whole, *torn], {})
    assert [path.name[9:14] for path in ada.quantisations[0].copy.paths] == ["00001", "00002", "00003"]
    assert ada.quantisations[0].size_bytes == 300
    assert ada.quantisations[0].fault == ""
    assert bob.quantisations[0].fault == "is incomplete: part 2 of 3 is missing; download the model again"


def test_deleted_parts_and_side_files_are_not_there() -> None:
    parts = [found(f"Ada-Q8_0-0000{number}-of-00003.gguf") for number in (1, 2, 3)]
    projector = replace(found("mmproj-Ada-F16.gguf"), is_missing=True)
    gone = [replace(part, is_missing=True) for part in parts]
    (torn,) = group([parts[0], gone[1], parts[2], projector], {})
    assert torn.quantisations[0].copy.paths == (parts[0].path, parts[2].path)
    assert torn.quantisations[0].fault == "is incomplete: part 2 of 3 is missing; download the model again"
    assert torn.side_files == ()
    (missing,) = group(gone, {})
    assert missing.quantisations[0].copy.paths == tuple(part.path for part in gone)
    assert missing.quantisations[0].fault == f"no longer exists at {gone[0].path}"


def test_copies_are_one_quantisation_with_the_own_one_first(tmp_path: Path) -> None:
    content = model_bytes()
    put(tmp_path / "lm/pub/Ada-GGUF/Ada-Q8_0.gguf", content)
    put(tmp_path / "own/Ada-Q8_0.gguf", content)
    stores = (Store("lm_studio", tmp_path / "lm", "LM Studio"), Store("folder", tmp_path / "own"))
    entry = entries_in(*stores)["Ada"]
    assert [copy.first.store.kind for copy in entry.quantisations[0].copies] == ["folder", "lm_studio"]
    assert entry.owners == (str(tmp_path / "own"), "LM Studio")


def test_side_files_go_with_the_model_of_their_name(tmp_path: Path) -> None:
    for name in ("Ada-4B", "Bob-4B"):
        put(tmp_path / f"{name}-Q8_0.gguf", model_bytes(name))
        put(tmp_path / f"mmproj-{name}-F16.gguf", projector_bytes())
    put(tmp_path / "mtp-Ada-4B-Q8_0.gguf", model_bytes("draft", n_layers=1))
    put(tmp_path / "Bob-4B.imatrix", b"x")
    entries = entries_in(Store("folder", tmp_path))
    assert sides(entries["Ada-4B"]) == ["draft mtp-Ada-4B-Q8_0.gguf", "projector mmproj-Ada-4B-F16.gguf"]
    assert sides(entries["Bob-4B"]) == ["imatrix Bob-4B.imatrix", "projector mmproj-Bob-4B-F16.gguf"]
    assert entries["Ada-4B"].capabilities == ("images",)


def test_a_name_that_lies_is_found_out_by_the_header(tmp_path: Path) -> None:
    put(tmp_path / "gemma-3-4b-Q8_0.gguf", model_bytes(n_embd=32))
    put(tmp_path / "gemma-3-12b-Q8_0.gguf", model_bytes(n_embd=64))
    put(tmp_path / "mmproj-gemma-3-F16.gguf", projector_bytes(n_embd=64))
    put(tmp_path / "tuned.gguf", adapter_bytes(n_embd=64))
    store = Store("folder", tmp_path)
    by_name = entries_in(store, reads=False)
    assert sides(by_name["gemma-3-4b"]) == sides(by_name["gemma-3-12b"]) == ["projector mmproj-gemma-3-F16.gguf"]
    entries = entries_in(store)
    assert sides(entries["gemma-3-4b"]) == []
    assert sides(entries["gemma-3-12b"]) == ["projector mmproj-gemma-3-F16.gguf"]
    assert "tuned" not in entries


def test_a_nameless_projector_belongs_to_its_folder(tmp_path: Path) -> None:
    for name, n_embd in (("Ada", 32), ("Bob", 64)):
        put(tmp_path / "pub" / name / f"{name}-Q8_0.gguf", model_bytes(n_embd=n_embd))
        put(tmp_path / "pub" / name / "mmproj-F16.gguf", projector_bytes(n_embd=n_embd))
        put(tmp_path / "pub" / name / "mmproj-Q8_0.gguf", projector_bytes(n_embd=n_embd, sound=True))
    put(tmp_path / "pub/lost/mmproj-F16.gguf", projector_bytes())
    ada = entries_in(Store("lm_studio", tmp_path, "LM Studio"))["Ada"]
    assert sides(ada) == ["projector mmproj-F16.gguf", "projector mmproj-Q8_0.gguf"]
    nearest = ada.side_file("projector", ada.quantisations[0])
    assert nearest is not None
    assert nearest.tag == "Q8_0"


def test_each_store_makes_entries(tmp_path: Path) -> None:
    layers = {"model": model_bytes("b", n_embd=64), "projector": projector_bytes(n_embd=32), "draft": model_bytes("d")}
    put_in_ollama(tmp_path / "ollama", "llava:7b-q4_0", layers)
    put_in_ollama(tmp_path / "ollama", "llava:latest", {"model": model_bytes("c", n_embd=128)})
    put_in_hub_cache(tmp_path / "hub", "org/Ada-GGUF", "Q8_0/Ada-Q8_0.gguf", model_bytes())
    put_in_hub_cache(tmp_path / "hub", "org/Ada-GGUF", "mmproj-F16.gguf", projector_bytes())
    put_in_hub_cache(tmp_path / "hub", "org/Other", "mmproj-F16.gguf", projector_bytes(sound=True))
    entries = entries_in(Store("ollama", tmp_path / "ollama", "Ollama"), Store("huggingface", tmp_path / "hub", "HF"))
    # What the manifest says counts, whatever the header's widths are.
    assert [role.split()[0] for role in sides(entries["llava:7b"])] == ["draft", "projector"]
    assert labels(entries["llava:7b"]) == ["Q4_0"]
    assert sides(entries["llava"]) == []
    assert sides(entries["Ada"]) == ["projector mmproj-F16.gguf"]
    assert entries["Ada"].capabilities == ("images",)


_NAMES = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "a/b", "c"]),
        st.sampled_from(["Ada", "ada", "Bob", "model", "mmproj-Ada", "mmproj", "imatrix", "mtp-Bob", "x"]),
        st.sampled_from(["", "-Q8_0", "-Q4_K_M", "-F16"]),
        st.sampled_from(["", "-00001-of-00002", "-00002-of-00002"]),
    ),
    unique=True,
    max_size=25,
)


@given(_NAMES, st.randoms(use_true_random=False))
def test_every_file_has_one_place_in_any_order(names: list[tuple[str, str, str, str]], random: Random) -> None:
    files = [found(f"{folder}/{base}{tag}{part}.gguf") for folder, base, tag, part in names]
    entries = group(files, {})
    placed = [part for entry in entries for each in entry.quantisations for copy in each.copies for part in copy.parts]
    models = [file for file in files if file.parsed.role == "model"]
    assert sorted(placed, key=lambda file: file.path) == sorted(models, key=lambda file: file.path)
    random.shuffle(files)
    again = group(files, {})
    assert [entry.key for entry in again] == [entry.key for entry in entries]
    assert [sides(entry) for entry in again] == [sides(entry) for entry in entries]
