"""A planned build of the engine, for tests of the set-up that do not build it."""

from __future__ import annotations

from resources.setup.build_plan import Build
from resources.setup.machine import Machine

MACHINE = Machine(system="linux", architecture="x86_64", libc="glibc-2.36", compiler="g++ 12.2.0", cpu_flags="ab12")
BUILD = Build(version="0.3.36", backend="cpu", options=("-DGGML_RPC=ON",), toolkit="", machine=MACHINE)
