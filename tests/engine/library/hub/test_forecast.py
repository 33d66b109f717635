"""A header read by HTTP ranges equals that of the file, needs few bytes, and gives a forecast of each quantisation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base.errors import ModelFileError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, make_host
from engine.library.hub.addresses import HubAddress
from engine.library.hub.client import list_repo
from engine.library.hub.fit import FitVerdict, HeaderGrade, QuantisationFit, RepoFit
from engine.library.hub.forecast import FitOptions, fit_listing, scaled_model
from engine.library.hub.remote_header import HeaderCache, read_remote_model
from engine.library.hub.settings import HubSettings, hub_settings
from engine.model.gguf.reader import read_model
from tests.support.gguf_bytes import GgufBytes, number_value, text_value
from tests.support.hub_server import HubServer, Repo, hub_server
from tests.support.models import write_header_only

REPO = "org/eight-GGUF"
TYPES = {"F16": "F16", "Q8_0": "Q8_0", "Q6_K": "Q6_K", "Q4_K": "Q4_K_M"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An 8B model of true size, with holes for its weights."""
    folder = tmp_path_factory.mktemp("eight")
    return {
        f"eight-{tag}.gguf": write_header_only(
            folder / f"eight-{tag}.gguf", n_layers=32, n_embd=4096, n_head=32, n_ff=14336, n_vocab=32000, file_type=kind
        )
        for kind, tag in TYPES.items()
    }


@pytest.fixture(scope="module")
def server(files: dict[str, Path]) -> Iterator[HubServer]:
    with hub_server(Repo(REPO, dict(files))) as found:
        yield found


@pytest.fixture
def hub(server: HubServer) -> HubSettings:
    server.asked.clear()
    server.sent.clear()
    return hub_settings(environment={"HF_ENDPOINT": server.url})


def _rig(card_bytes: int, host_bytes: int = 64 * GIB) -> Rig:
    card = Device(
        id="CUDA0", name="RTX 3090", backend="CUDA", kind="gpu", total_bytes=card_bytes, free_bytes=card_bytes,
        margin_bytes=512 * MIB,
    )  # fmt: skip
    return Rig((card,) if card_bytes else (), make_host("host", host_bytes, host_bytes))


def _fit(hub: HubSettings, rig: Rig, cache: HeaderCache | None = None) -> RepoFit:
    return fit_listing(list_repo(REPO, hub, None), HubAddress(REPO), hub, None, cache, lambda _: FitOptions(rig))


def test_the_header_is_that_of_the_file(
    server: HubServer, hub: HubSettings, files: dict[str, Path], tmp_path: Path
) -> None:
    listing = list_repo(REPO, hub)
    cache = HeaderCache(tmp_path)
    here = read_model(files["eight-Q4_K_M.gguf"])
    there = read_remote_model(listing, listing.find("Q4_K_M"), hub, cache)
    assert replace(there, paths=here.paths) == here
    sent = server.bytes_sent("eight-Q4_K_M.gguf")
    assert 0 < sent < 16 * MIB < here.size_bytes
    asked = len(server.asked)
    assert read_remote_model(listing, listing.find("Q4_K_M"), hub, cache) == there
    assert len(server.asked) == asked, "what is kept is not asked for again"


def test_what_fits_where(hub: HubSettings) -> None:
    found = _fit(hub, _rig(7 * GIB))
    by_tag = {fit.quantisation.tag: fit for fit in found.fits}
    assert [fit.quantisation.tag for fit in found.fits] == ["Q4_K_M", "Q6_K", "Q8_0", "F16"]
    assert by_tag["Q4_K_M"].verdict is FitVerdict.CARDS
    assert by_tag["F16"].verdict is FitVerdict.PARTLY
    assert 0 < by_tag["Q8_0"].n_layers_on_cpu < by_tag["F16"].n_layers_on_cpu < 33
    assert f"{by_tag['F16'].n_layers_on_cpu} layers" in by_tag["F16"].sentence
    assert {tag for tag, fit in by_tag.items() if fit.grade is HeaderGrade.HEADER} == {"Q4_K_M"}
    assert found.best == "eight-Q4_K_M"
    assert "Q4_K_M" in found.why


def test_the_projector_of_the_repository_is_counted(
    hub: HubSettings, server: HubServer, files: dict[str, Path]
) -> None:
    projector = bytes(1 << 20)
    server.add(Repo("org/seeing", {**files, "mmproj-F16.gguf": projector}))
    rig = _rig(7 * GIB)

    def fit(*, text_only: bool) -> QuantisationFit:
        options = FitOptions(rig, text_only=text_only)
        address = HubAddress("org/seeing")
        return fit_listing(list_repo(address.repo, hub, None), address, hub, None, None, lambda _: options).fits[0]

    counted, text_only = fit(text_only=False), fit(text_only=True)
    assert counted.projector is not None
    assert counted.projector.path == "mmproj-F16.gguf"
    assert counted.need_bytes == text_only.need_bytes + len(projector)
    assert counted.sentence == f"{text_only.sentence} The forecast includes the projector (1.0 MiB)."
    assert text_only.projector is None


@pytest.mark.parametrize(
    ("card_gib", "host_gib", "best", "verdict"),
    [
        (24, 64, "Q8_0", FitVerdict.CARDS),  # F16 fits too, and is no better
        (0, 64, "Q4_K_M", FitVerdict.CPU),
        (5, 64, "Q4_K_M", FitVerdict.PARTLY),
        (0, 2, None, FitVerdict.NOT),
    ],
)
def test_the_proposal(
    hub: HubSettings, card_gib: int, host_gib: int, best: str | None, verdict: FitVerdict, tmp_path: Path
) -> None:
    found = _fit(hub, _rig(card_gib * GIB, host_gib * GIB), HeaderCache(tmp_path))
    chosen = next((fit for fit in found.fits if fit.quantisation.name == found.best), None)
    assert (chosen.quantisation.tag if chosen else None) == best
    assert (chosen or found.fits[0]).verdict is verdict
    assert found.why


def test_a_scaled_header_is_near_the_true_one(hub: HubSettings, files: dict[str, Path]) -> None:
    listing = list_repo(REPO, hub)
    for tag in ("Q6_K", "Q8_0", "F16"):
        true = read_model(files[f"eight-{tag}.gguf"])
        scaled = scaled_model(read_model(files["eight-Q4_K_M.gguf"]), listing.find(tag))
        assert scaled.size_bytes == true.size_bytes
        for one, two in zip(scaled.blocks, true.blocks, strict=True):
            assert one.total_bytes == pytest.approx(two.total_bytes, rel=0.02)


def test_further_parts_cost_little(hub: HubSettings, server: HubServer) -> None:
    parts = {}
    for number in range(3):
        part = GgufBytes()
        part.pairs = {"general.architecture": text_value("llama")} if number else part.pairs
        part.pairs |= {"split.no": number_value(number, 2), "split.count": number_value(3, 2)}
        part.tensors = [part.tensors[number]]
        parts[f"wide-{number + 1:05d}-of-00003.gguf"] = part.build() + bytes(4 * MIB)
    server.add(Repo("org/wide", dict(parts)))
    listing = list_repo("org/wide", hub)
    model = read_remote_model(listing, listing.find(None), hub)
    assert [path.name for path in model.paths] == list(parts)
    assert server.bytes_sent("wide-00002-of-00003.gguf") < 1 * MIB


def test_what_is_no_model_is_said(hub: HubSettings, server: HubServer) -> None:
    server.add(Repo("org/page", {"page.gguf": b"<!doctype html>" + bytes(100)}))
    listing = list_repo("org/page", hub)
    with pytest.raises(ModelFileError, match="web page"):
        read_remote_model(listing, listing.find(None), hub)
