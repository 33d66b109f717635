"""Checks of the installed software: the engine and its build, drivers, toolkits, the system, and unused cards."""

from __future__ import annotations

import platform
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from engine.base.confinement import limits_memory, missing_protections
from engine.base.engine_build import engine_build
from engine.base.landlock import landlock_version
from engine.base.pci import PciId, parse_pci_id
from engine.base.seccomp import can_refuse_calls
from engine.devices.hiding_variables import find_hiding
from engine.devices.packs.store import ListedPack
from engine.devices.telemetry.cards import Nvml, nvidia_driver
from engine.machines.doctor.report import Check
from engine.runtime.process.system import output_of

PCI_ROOT = Path("/sys/bus/pci/devices")
MAKERS = {0x10DE: "NVIDIA", 0x1002: "AMD", 0x8086: "Intel"}
_BACKENDS = {"NVIDIA": ("CUDA", "Vulkan"), "AMD": ("HIP", "ROCm", "Vulkan"), "Intel": ("Vulkan", "SYCL")}
_SETTING = {"NVIDIA": "cuda", "AMD": "vulkan", "Intel": "vulkan"}
_DISPLAY, _ACCELERATOR = 0x03, 0x12
"""PCI base classes of cards: display controller and processing accelerator."""


class Card(Struct, frozen=True):
    """A graphics card or accelerator on the PCI bus.

    `slot`: PCI address.
    `model`: PCI device id as four hexadecimal digits.
    `driver`: name of its kernel module, empty if it has none.
    """

    slot: PciId
    maker: str
    model: str
    driver: str = ""


def cards_on_bus(root: Path = PCI_ROOT) -> tuple[Card, ...]:
    """Return the cards of NVIDIA, AMD and Intel in Linux's list of PCI devices; empty on other systems.

    `root`: folder of that list, which tests replace.
    """
    found = []
    for folder in sorted(root.glob("*")):
        slot = parse_pci_id(folder.name)
        # `class` has 24 bits: base class, subclass, programming interface.
        kind, maker = _number(folder / "class") >> 16, MAKERS.get(_number(folder / "vendor"))
        if slot is not None and maker is not None and kind in (_DISPLAY, _ACCELERATOR):
            # A symbolic link whose target has the driver's name.
            driver = folder / "driver"
            name = driver.resolve().name if driver.exists() else ""
            found.append(Card(slot, maker, f"{_number(folder / 'device'):04x}", name))
    return tuple(found)


def card_checks(
    cards: Collection[Card], used: Collection[PciId], backends: Collection[str], packs: Sequence[ListedPack] = ()
) -> Iterable[Check]:
    """Yield a check for each card: whether the engine uses it, or else why not.

    If the engine uses at least one card, unused cards do not fail the check: one may be the processor's GPU.

    `used`: PCI addresses of the cards that the engine uses.
    `backends`: names of the backends that the engine was built with.
    `packs`: installed engine packs.
    """
    has_used = any(card.slot in used for card in cards)
    for card in cards:
        is_used = card.slot in used
        yield Check(
            name="card",
            device=f"{card.slot.domain:04x}:{card.slot.bus:02x}:{card.slot.device:02x}",
            ok=True if is_used else None if has_used else False,
            detail=f"{card.maker} {card.model}" + ("" if is_used else f": {_why_not(card, backends, packs)}"),
            figures={"maker": card.maker, "model": card.model, "driver": card.driver or None},
        )


def _why_not(card: Card, backends: Collection[str], packs: Sequence[ListedPack]) -> str:
    wanted = _BACKENDS[card.maker]
    installed = [pack for pack in packs if pack.backend in wanted]
    idle = next((pack for pack in installed if pack.state != "used"), None)
    if not card.driver:
        return f"no driver uses it. Install {card.maker}'s driver."
    if card.driver == "vfio-pci":
        return "it is assigned to a virtual machine."
    if not set(wanted) & {*backends, *(pack.backend for pack in installed if pack.state == "used")}:
        if idle is not None:
            return f"the engine pack {idle.name} supports it. {idle.words}"
        return (
            f"the engine was built without {' and '.join(wanted)}. Install the engine pack (Devices > Engine Packs), "
            f"or in a checkout the toolkit, then `LAYERDECK_BACKEND={_SETTING[card.maker]} python3 make.py setup`."
        )
    if card.driver == "nouveau":
        return "it uses the driver nouveau, which does not work with CUDA. Install NVIDIA's driver."
    hiding = [each.variable.name for each in find_hiding() if set(each.variable.backends) & set(wanted)]
    if hiding:
        return f"{' and '.join(hiding)} may hide it: unset the variable, or add the card to its value."
    return "the engine's backend does not list it: the driver may not match the toolkit, or the card is too old."


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii").strip(), 16)
    except (OSError, ValueError):
        return 0


_NAMES = {"cuda": "CUDA", "vulkan": "Vulkan", "hip": "HIP", "metal": "Metal", "rpc": "RPC", "sycl": "SYCL",
          "blas": "BLAS", "cpu": "CPU"}  # fmt: skip
_TOOLS = {"nvcc": "--version", "glslc": "--version", "hipcc": "--version", "vulkaninfo": "--summary"}
_TIMEOUT_S = 10.0
_MAX_WORDS_BYTES = 1 << 16
_LIBRARY = re.compile(r"(?:lib)?ggml-([a-z]+)(?:-[\w-]+)?\.(?:so|dylib|dll)")


def backends_built() -> tuple[str, ...]:
    """Return the names of the backends that the engine was built with, by the ggml libraries in its package."""
    from importlib import metadata

    files = [file.name for file in metadata.distribution("llama_cpp_python").files or ()]
    found = {match[1] for name in files if (match := _LIBRARY.match(name))}
    return tuple(sorted(_NAMES[name] for name in found if name in _NAMES))


def installed_checks() -> Iterable[Check]:
    """Yield checks of the system, the engine, drivers and toolkits. Slow: toolkits are run to read their versions."""
    yield Check(
        name="system",
        detail=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        figures={"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
    )
    yield _confinement()
    backends = backends_built()
    yield Check(
        name="engine",
        detail=f"{engine_build()}, built with {', '.join(backends)}",
        figures={"build": engine_build(), "backends": " ".join(backends)},
    )
    nvml = Nvml()
    try:
        nvml.open()
        driver, problem = nvidia_driver(nvml), nvml.problem
    finally:
        nvml.close()
    yield Check(
        name="NVIDIA driver",
        ok=True if driver else None,
        detail=driver or f"none ({problem or 'not installed'})",
        figures={"version": driver},
    )
    for tool, option in _TOOLS.items():
        version = _version(tool, option)
        yield Check(name="toolkit", ok=True if version else None, detail=f"{tool} {version or 'is not installed'}")


def pack_checks(packs: Iterable[ListedPack]) -> Iterable[Check]:
    """Yield a check for each installed engine pack. It passes also if the user has switched the pack off."""
    for pack in packs:
        yield Check(
            name="engine pack",
            ok=None if pack.state == "unchecked" else pack.state != "broken",
            detail=f"{pack.name}: {pack.words}",
            figures={
                "backend": pack.backend,
                "engine": pack.engine,
                "size_bytes": pack.size_bytes,
                "state": pack.state,
            },
        )


def _confinement() -> Check:
    """Return a check of what this system supports to confine child processes: Landlock, seccomp, memory limits."""
    version, limited, refuses = landlock_version(), limits_memory(), can_refuse_calls()
    detail = " ".join(
        (
            f"Children keep the rights of the table (Landlock version {version}{', seccomp' if refuses else ''})."
            if version
            else "Children are not confined to their files.",
            "Their memory is limited." if limited else "Their memory is not limited.",
            *missing_protections(),
        )
    )
    return Check(
        name="confinement",
        ok=True if version and limited and refuses else None,
        detail=detail,
        figures={"landlock_version": version, "seccomp": refuses, "memory_limits": limited},
    )


def environment_checks() -> Iterable[Check]:
    """Yield a check for each environment variable that is set and can hide devices.

    The check does not fail, because the user may want to hide devices.
    """
    for each in find_hiding():
        yield Check(
            name="environment",
            ok=None,
            detail=each.sentence,
            figures={"variable": each.variable.name, "value": each.value},
        )


def _version(tool: str, option: str) -> str | None:
    path = shutil.which(tool)
    if path is None:
        return None
    try:
        output = output_of([path, option], timeout_s=_TIMEOUT_S, max_bytes=_MAX_WORDS_BYTES)
    except OSError:
        return None
    # The first number with a dot is the version in the output of each of these tools.
    match = re.search(r"\d{1,9}(?:\.\d{1,9}){1,5}", output.decode("utf-8", "replace"))
    return match.group() if match else "of unknown version"
