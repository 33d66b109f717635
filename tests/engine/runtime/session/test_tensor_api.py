"""A load that fails in Metal's tensor API is tried once more without it."""

from __future__ import annotations

import pytest

from engine.base.engine_log import reports_tensor_api_failure
from engine.runtime.session.events import Crashed, Failed, Fallback, Loaded, Progress
from tests.engine.runtime.session.test_session import fake
from tests.support.fake_worker import METAL_LINES
from tests.support.load_specs import make_spec


@pytest.mark.parametrize("how", ["", "abort"])
def test_a_load_is_tried_once_without_the_tensor_api_and_says_so(how: str) -> None:
    with fake("tensor_api", how) as log:
        log.session.load(make_spec())
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Loaded)
        (told,) = [event for event in log.events if isinstance(event, Fallback)]
        assert "failed in Metal's tensor API and is tried again without this API" in told.message
        place = log.events.index(told)
        begun = [event.stage for event in log.events[place:] if isinstance(event, Progress)]
        assert begun[0] == "header", "all stages begin anew"
        assert not any(isinstance(event, Failed | Crashed) for event in log.events)


def test_later_loads_leave_it_out_from_the_start() -> None:
    with fake("tensor_api") as log:
        for count in (1, 2):
            log.session.load(make_spec())
            log.wait_for_endings(count)
        assert sum(isinstance(event, Fallback) for event in log.events) == 1


@pytest.mark.parametrize(("mode", "argument"), [("tensor_api", "always"), ("failure", "")])
def test_a_load_that_fails_without_it_too_or_for_another_reason_is_not_tried_again(mode: str, argument: str) -> None:
    with fake(mode, argument) as log:
        log.session.load(make_spec())
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Failed)
        assert sum(isinstance(event, Fallback) for event in log.events) == (mode == "tensor_api")


@pytest.mark.parametrize(
    ("line", "tells"),
    [
        ("ggml_metal_library_compile_all: failed to build 'mul_mm' library: Error Domain=MTLLibraryErrorDomain", True),
        (
            "ggml_metal_library_compile_pipeline: failed to create pipeline state: base = 'kernel_mul_mm_f16'",
            True,
        ),
        ("ggml_metal_library_init: Error Domain=x 'ggml-tensor.metallib' could not be opened: Error", True),
        # Said on each start of a chip without it, or where it is left out: no failure.
        ("ggml_metal_device_init: tensor API disabled for pre-M5 and pre-A19 devices", False),
        ("ggml_metal_device_init: testing tensor API for f16 support", False),
        ("ggml_metal_library_init_from_source: error compiling source", False),
        ("ggml_metal_device_init: - the tensor API is not supported in this environment - disabling", False),
        ("ggml_metal_library_init: ggml-tensor.metallib not found - disabling the tensor API", False),
        ("ggml_metal_library_compile_all: failed to build 'norm' library: Error Domain=MTLLibraryErrorDomain", False),
        ("ggml_metal_buffer_init: error: failed to allocate buffer, size = 100.00 MiB", False),
    ],
)
def test_lines_of_the_log_that_tell_of_it(line: str, tells: bool) -> None:
    assert reports_tensor_api_failure(line) is tells


def test_the_lines_of_the_fake_worker_outlive_the_tail_of_the_log() -> None:
    lines = METAL_LINES.splitlines()
    assert not any(map(reports_tensor_api_failure, lines[-40:]))
    assert any(map(reports_tensor_api_failure, lines))
