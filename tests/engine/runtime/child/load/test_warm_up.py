"""The sizes of warm-up batches, with a stand-in for the context."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.load.warm_up import WarmUp


class CountingBatch:
    """A batch that only counts its tokens."""

    def __init__(self, _size: int) -> None:
        self.struct = 0

    def clear(self) -> None:
        self.struct = 0

    def extend(self, tokens: list[int], *_: object, **__: object) -> None:
        self.struct += len(tokens)


@pytest.mark.parametrize(("is_known", "sizes"), [(False, [1, 8, 64, 512]), (True, [1])])
def test_a_known_load_computes_one_token(is_known: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine must not end the warm-up early.
    monkeypatch.setattr("engine.runtime.child.load.warm_up.time.monotonic", lambda: 0.0)
    computed: list[int] = []

    def compute(size: int) -> int:
        computed.append(size)
        return 0

    loaded: Any = SimpleNamespace(
        parts=tuple,
        context_tokens=1024,
        batch_tokens=2048,
        n_sequences=1,
        side_files=None,
        embeddable_tokens=0,
        output_rows=1,
        makes_text=True,
        log=SimpleNamespace(on_failed=None),
        engine=SimpleNamespace(low=SimpleNamespace(llama_vocab_bos=lambda _vocabulary: 1)),
        vocabulary=None,
        vocabulary_size=8,
        new_batch=CountingBatch,
        compute=compute,
        clear=lambda: None,
    )
    reporter = SimpleNamespace(enter=lambda *_: None, advance=lambda _: None, stage="warm_up")
    free, stop = SimpleNamespace(note=None), SimpleNamespace(requested=False)
    WarmUp(loaded, cast(Any, free), cast(Any, stop), cast(Any, reporter)).run(
        ContextSettings(n_ctx=1024, n_ubatch=512), is_known=is_known
    )
    assert computed == sizes
