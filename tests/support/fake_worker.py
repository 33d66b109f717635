"""Stand-in for the model child that misbehaves on request: `python fake_worker.py MODE [ARGUMENT]`.

Tests use it for failures that must happen at an exact moment.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from engine.runtime.protocol.messages import (
    PROTOCOL_VERSION,
    Aborting,
    AllocationFailure,
    BufferMemory,
    DeviceList,
    DeviceMemoryReading,
    DeviceMemoryReadings,
    Failure,
    Generated,
    GgmlDevice,
    Hello,
    LoadedModel,
    Message,
    Piece,
    Probed,
    StageProgress,
    Stopped,
)
from engine.runtime.protocol.requests import (
    AnyRequest,
    DeviceMemoryQuery,
    Generate,
    ListDevices,
    Load,
    ModelRequest,
    Probe,
    Quit,
    Stop,
)

MIB = 1024**2
# The formats are those of ggml-metal-device.m and ggml-metal-context.m of llama-cpp-python 0.3.36; the compiler's
# messages are from llama.cpp's issue 17986. A real one has hundreds of lines.
METAL_LINES = (
    """ggml_metal_device_init: testing tensor API for f16 support
ggml_metal_library_compile_all: failed to build 'mul_mm' library: Error Domain=MTLLibraryErrorDomain Code=3 \
"program_source:3765:5: error: static_assert failed due to requirement '__tensor_ops_detail::__is_same_v<bfloat, half>'
    static_assert(__tensor_ops_detail::__is_same_v<_leftType, leftValueType>, "Input types must match cooperative \
tensor types");
"""
    + "    ^             ~~~~~~~~~~~~~~~~~~~~~~~~\n" * 100
    + """ggml_metal_init: error: failed to initialize the Metal library
ggml_backend_metal_device_init: error: failed to allocate context
llama_init_from_model: failed to initialize the context: failed to initialize MTL0 backend
"""
)
_decoder: msgspec.json.Decoder[AnyRequest] = msgspec.json.Decoder(AnyRequest)


def fake_worker_argv(mode: str, argument: str = "") -> list[str]:
    """Return the command that starts the stand-in in `mode`."""
    return [sys.executable, "-I", str(Path(__file__).resolve()), mode, argument]


class FakeWorker:
    """Answers requests as the model child does, except for what its mode changes."""

    def __init__(self, mode: str, argument: str) -> None:
        self.mode = mode
        self.argument = argument
        self.requests: queue.SimpleQueue[AnyRequest | None] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.line_bytes: dict[int, int] = {}
        """Bytes of the line of each request on the model, by request number."""
        self.ends: dict[int, threading.Event] = {}
        """By request number: set when the parent asks to end the request."""

    def run(self) -> None:
        if self.mode in ("stubborn", "stubborn_generate"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.mode == "silent":
            self._wait_for_ever()
        if self.mode == "no_hello":
            say(Piece(request=1, text="hi"))
        say(Hello(protocol=PROTOCOL_VERSION + (self.mode == "other_version"), engine="fake", pid=os.getpid()))
        if self.mode == "dies_after_hello":
            os._exit(7)
        threading.Thread(target=self._read, daemon=True).start()
        while (request := self.requests.get()) is not None:
            match request:
                case Load():
                    self._load()
                case Generate() if self.mode == "lost_in_generate":
                    self._load_rpc_lost()
                case Generate():
                    self._generate(request)
                case ListDevices():
                    say(DeviceList(devices=tuple(_devices(request.endpoints))))
                case Probe() if self.argument != "deaf_to_probes":
                    say(
                        Probed(
                            parts=(BufferMemory(device="CPU", buffer_type="CPU", weights_bytes=10 * MIB),), exact=True
                        )
                    )
                case DeviceMemoryQuery():
                    say(DeviceMemoryReadings(readings=(DeviceMemoryReading("CPU", 1, 2),)))
                    if self.mode == "lost_after_query":
                        self._load_rpc_lost()

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            request = _decoder.decode(line)
            if isinstance(request, Stop):
                self._stop(request.request)
            elif isinstance(request, Quit):
                break
            else:
                if isinstance(request, ModelRequest):
                    self.ends[request.id] = threading.Event()
                    self.line_bytes[request.id] = len(line)
                self.requests.put(request)
        if not self.mode.startswith("stubborn"):
            self._stop(None)
            self.requests.put(None)

    def _stop(self, number: int | None) -> None:
        for each in self.ends if number is None else (number,):
            self.ends[each].set()
        if number is None:
            self.stopped.set()

    def _load(self) -> None:
        say(StageProgress(stage="allocate"))
        misbehave: Callable[[], None] | None = getattr(self, f"_load_{self.mode}", None)
        if misbehave is not None:
            misbehave()
            return
        for fraction in (0.0, 0.6, 0.4, 1.0):
            say(StageProgress(stage="read", fraction=fraction))
        say(StageProgress(stage="allocate", fraction=0.5))
        say(StageProgress(stage="context"))
        say(StageProgress(stage="warm_up", fraction=1.0))
        say(_loaded())
        if self.mode == "dies_idle":
            os.kill(os.getpid(), signal.SIGKILL)

    def _load_slow(self) -> None:
        while not self.stopped.wait(0.02):
            say(StageProgress(stage="read", fraction=0.5))
        say(Stopped(stage="read"))

    def _load_deaf(self) -> None:
        self._wait_for_ever()

    def _load_stubborn(self) -> None:
        self._wait_for_ever()

    def _load_late(self) -> None:
        """Ignore a request to stop, and report success afterwards."""
        self.stopped.wait()
        say(_loaded())

    def _load_killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _load_quiet_end(self) -> None:
        os._exit(0)

    def _load_noisy(self) -> None:
        sys.stderr.write("noise\n" * 20000 + "the last straw\n")
        sys.stderr.flush()
        os._exit(3)

    def _load_rpc_lost(self) -> None:
        say(Aborting(text="ggml-rpc.cpp:566: Remote RPC server crashed or returned malformed response"))
        os.abort()

    def _load_rpc_unreachable(self) -> None:
        sys.stderr.write(f"ggml-rpc.cpp:547: Failed to connect to {self.argument}\n")
        sys.stderr.flush()
        os.abort()

    def _load_broken(self) -> None:
        os.write(1, b"llama_model_loader: loaded meta data\n")
        self._wait_for_ever()

    def _load_half_line(self) -> None:
        os.write(1, b'{"type":"stage_prog')
        os.kill(os.getpid(), signal.SIGKILL)

    def _load_unknown_message(self) -> None:
        os.write(1, b'{"type":"greetings"}\n')
        self._wait_for_ever()

    def _load_deep_message(self) -> None:
        os.write(1, b'{"x":' + b"[" * 60_000 + b"\n")
        self._wait_for_ever()

    def _load_huge_line(self) -> None:
        piece = b"x" * (1 << 20)
        try:
            while True:
                os.write(1, piece)
        except BrokenPipeError:
            self._wait_for_ever()

    def _load_out_of_memory(self) -> None:
        parts = (
            BufferMemory(device="RPC0", buffer_type="RPC0[127.0.0.1:1]", weights_bytes=100 * MIB),
            BufferMemory(device="CPU", buffer_type="CPU", weights_bytes=10 * MIB),
        )
        say(
            AllocationFailure(
                stage="context",
                device="RPC0",
                buffer_type="RPC0[127.0.0.1:1]",
                requested_bytes=300 * MIB,
                free_bytes=None,
                parts=parts,
                text="failed to allocate",
            )
        )

    def _load_failure(self) -> None:
        say(Failure(kind="model_file", message="The file is no model."))

    def _load_failure_once(self) -> None:
        """Fail if the file named by the argument does not exist, and create it; otherwise succeed."""
        marker = Path(self.argument)
        if marker.exists():
            say(_loaded())
        else:
            marker.touch()
            self._load_failure()

    def _load_tensor_api(self) -> None:
        """Fail like ggml-metal when its kernels do not compile with Metal's tensor API.

        If that API is disabled, the load succeeds. The argument "abort" crashes in place of the failure. With "always"
        the load fails without the API too.
        """
        if "GGML_METAL_TENSOR_DISABLE" in os.environ and self.argument != "always":
            say(_loaded())
            return
        sys.stderr.write(METAL_LINES)
        sys.stderr.flush()
        if self.argument == "abort":
            os.abort()
        say(Failure(kind="unreachable", message="A device did not start: failed to initialize MTL0 backend."))

    def _load_failure_then_crash(self) -> None:
        say(Failure(kind="model_file", message="The file is no model."))
        os.abort()

    def _generate(self, request: Generate) -> None:
        end = self.ends[request.id]
        match self.mode:
            case "endless":
                while not end.wait(0.02):
                    say(Piece(request=request.id, text="a"))
            case "flood":
                while not end.is_set():
                    say(Piece(request=request.id, text="a" * 100))
            case "deaf_flood":
                while True:
                    say(Piece(request=request.id, text="a" * 100))
            case "stubborn_generate" | "deaf_generate":
                say(Piece(request=request.id, text="a"))
                self._wait_for_ever()
            case "killed_generate" | "exhausted_generate":
                say(Piece(request=request.id, text="a"))
                self._end_abruptly()
            case "failing_generate":
                say(Failure(kind="internal", message="No room in the batch.", request=request.id))
                return
            case "large_answer":
                say(Piece(request=request.id, text="a" * (5 << 20)))
            case "line_bytes":
                say(Piece(request=request.id, text=str(self.line_bytes[request.id])))
            case _:
                say(Piece(request=request.id, text=request.prompt, context_used=6))
        say(
            Generated(
                request=request.id,
                prompt_tokens=4,
                cached_tokens=2,
                evaluated_tokens=2,
                generated_tokens=3,
                prompt_seconds=0.5,
                generation_seconds=1.5,
                context_used=7,
                stop_reason="stopped" if end.is_set() else "end_of_text",
            )
        )

    def _end_abruptly(self) -> None:
        if self.mode == "exhausted_generate":
            say(Aborting(text="ggml-cuda.cu:109: CUDA error", device="CPU", free_bytes=3 * MIB))
        os.kill(os.getpid(), signal.SIGKILL if self.mode == "killed_generate" else signal.SIGABRT)

    def _wait_for_ever(self) -> None:
        threading.Event().wait()


def say(message: Message) -> None:
    """Write one message to standard output. If the parent has closed the pipe, the process ends."""
    data = msgspec.json.encode(message) + b"\n"
    while data:
        data = data[os.write(1, data) :]


def _devices(endpoints: Iterable[str]) -> Iterator[GgmlDevice]:
    """Yield a card, an accelerator and the CPU, then two devices for each endpoint."""
    yield GgmlDevice(
        name="CUDA0",
        description="Fast card",
        backend="CUDA",
        kind="gpu",
        free_bytes=23 << 30,
        total_bytes=24 << 30,
        pci_bus_id="0000:01:00.0",
        tensor_split=True,
    )
    yield GgmlDevice(name="BLAS", description="BLAS", backend="BLAS", kind="accel", free_bytes=0, total_bytes=0)
    yield GgmlDevice(name="CPU", description="CPU", backend="CPU", kind="cpu", free_bytes=1, total_bytes=1)
    for endpoint in endpoints:
        for index in range(2):
            yield GgmlDevice(
                name=f"RPC{index + 5}",
                description=endpoint,
                backend="RPC",
                kind="gpu",
                free_bytes=1 << 30,
                total_bytes=1 << 30,
                endpoint=endpoint,
                endpoint_device=index,
            )


def _loaded() -> LoadedModel:
    return LoadedModel(
        parts=(BufferMemory(device="CPU", buffer_type="CPU", weights_bytes=10 * MIB),),
        n_ctx=512,
        n_ctx_seq=512,
        slots=1,
        n_vocab=259,
        flash_attention=True,
        chat_template=True,
        layer_devices=("CPU", "CPU"),
        kv_devices=((0, "CPU"),),
    )


if __name__ == "__main__":
    FakeWorker(*sys.argv[1:3]).run()
