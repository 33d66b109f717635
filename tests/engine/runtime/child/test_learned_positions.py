"""Models with learned positions: no sequence exceeds them, in the warm-up and in answers."""

from __future__ import annotations

import gzip
from pathlib import Path

from engine.devices.device import Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import Done, Failed, Loaded
from tests.support.headers import write_with_hole
from tests.support.load_specs import spec_of
from tests.support.session_log import SessionLog
from tests.zoo.pack import FOLDER, read_document

POSITIONS = 256


def test_a_context_beyond_the_learned_positions_is_not_used(tmp_path: Path) -> None:
    name = "gpt2-dense"
    header = gzip.decompress((FOLDER / "headers" / f"{name}.gguf.head.gz").read_bytes())
    model = read_model(write_with_hole(tmp_path / f"{name}.gguf", header, read_document(name)["size_bytes"]))
    context = ContextSettings(n_ctx=1024, n_batch=1024, n_ubatch=1024)
    with SessionLog() as log:
        rig = Rig((), make_host("host", 8 << 30, 8 << 30))
        log.session.load(spec_of(model, rig, single_device(model.n_layers, "CPU"), context))
        (loaded,) = log.wait_for_endings(1)
        assert isinstance(loaded, Loaded), loaded
        assert log.session.snapshot.context_size == POSITIONS
        log.session.ask(Generate(prompt="a" * 4000, max_tokens=2))
        too_long = log.wait_for_endings(2)[1]
        assert isinstance(too_long, Failed), too_long
        log.session.ask(Generate(prompt="a", max_tokens=2 * POSITIONS, temperature=0.0))
        done = log.wait_for_endings(3)[2]
        assert isinstance(done, Done)
        # The last token is not computed any more.
        assert (done.stop_reason, done.prompt_tokens + done.generated_tokens) == ("context_full", POSITIONS + 1)
