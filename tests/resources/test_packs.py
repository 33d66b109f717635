"""Building packs: missing requirements are reported first, and the program reads the built pack."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

from app.packs import pack_keys
from engine.base.engine_build import engine_version
from engine.devices.packs.store import PackStore
from resources.packs import archive
from resources.packs.command import run_pack, sign_manifest
from resources.packs.cuda_parts import missing_parts
from resources.packs.needs import find_nvcc, find_settings_error, needed_glibc, needed_libraries
from resources.packs.recipes import LEFT_OUT, RECIPES, configure_options
from resources.packs.source import fetch_ggml, find_source
from resources.packs.wheel import leave_out
from resources.setup.errors import SetupError
from resources.setup.machine import find_compiler
from tests.support.packs import IS_NO_BACKEND, compiled

ROOT = Path(__file__).resolve().parents[2]


NVCC_WITHOUT_CUBLAS = """case "$1" in
--version) echo "Cuda compilation tools, release 13.1, V13.1.5" ;;
--dryrun) echo "#$ TOP=$(dirname "$0")/.." >&2 ;;
*) exit 1 ;;
esac"""


def program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_what_is_missing_for_cuda_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resources.packs.needs.find_nvcc", lambda _environ: None)
    assert find_settings_error("cuda", {}) == (
        "A CUDA pack cannot be built: nvcc cannot be found. Install the whole CUDA toolkit and let CUDA_HOME name it; "
        "a card is not needed."
    )
    bare = program(tmp_path / "bin" / "nvcc", "exit 1")
    monkeypatch.setattr("resources.packs.needs.find_nvcc", lambda _environ: str(bare))
    assert f"{bare} finds no cuBLAS." in str(find_settings_error("cuda", {}))
    program(bare, "exit 0")
    assert find_settings_error("cuda", {}) is None


def test_cublas_is_also_taken_from_nvidias_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = program(tmp_path / "toolkit" / "bin" / "nvcc", NVCC_WITHOUT_CUBLAS)
    monkeypatch.setattr("resources.packs.cuda_parts.VENV", tmp_path / "venv")
    fault = str(find_settings_error("cuda", {"CUDACXX": str(nvcc)}))
    assert "\n" not in fault
    assert fault.endswith("-m pip install 'nvidia-cublas==13.1.*'")
    wheel = tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "nvidia" / "cu13"
    for file in ("include/cublas_v2.h", "lib/libcublas.so.12"):
        (wheel / file).parent.mkdir(parents=True, exist_ok=True)
        (wheel / file).touch()
    assert find_settings_error("cuda", {"CUDACXX": str(nvcc)}) == fault, "it is for another CUDA"
    (wheel / "lib" / "libcublas.so.13").touch()
    assert find_settings_error("cuda", {"CUDACXX": str(nvcc)}) is None
    compiler = find_compiler("CC")
    assert compiler is not None
    *cublas, driver = missing_parts(str(nvcc), tmp_path, compiler)
    assert cublas == [
        f"-DCMAKE_CUDA_FLAGS=-I{wheel / 'include'}",
        f"-DCUDA_cublas_LIBRARY={wheel / 'lib' / 'libcublas.so.13'}",
        f"-DCUDA_cublasLt_LIBRARY={wheel / 'lib' / 'libcublasLt.so.13'}",
    ]
    assert driver.startswith("-DCUDA_cuda_driver_LIBRARY=")
    linked = tmp_path / "linked.so"
    caller = tmp_path / "caller.c"
    caller.write_text("int cuMemCreate(void), cuMemMap(void); int call(void) { return cuMemCreate() + cuMemMap(); }\n")
    command = [compiler, "-shared", "-fPIC", "-Wl,--as-needed", "-o", str(linked), str(caller)]
    subprocess.run([*command, driver.partition("=")[2]], check=True)
    assert needed_libraries(linked) == ("libcuda.so.1",)
    (tmp_path / "toolkit" / "lib64" / "stubs").mkdir(parents=True)
    (tmp_path / "toolkit" / "lib64" / "stubs" / "libcuda.so").touch()
    assert missing_parts(str(nvcc), tmp_path, compiler) == cublas


def test_nvcc_is_where_the_environment_says(tmp_path: Path) -> None:
    home = program(tmp_path / "cuda" / "bin" / "nvcc", "exit 0")
    other = program(tmp_path / "other" / "nvcc", "exit 0")
    assert find_nvcc({"CUDA_HOME": str(tmp_path / "cuda"), "PATH": str(other.parent)}) == str(home)
    assert find_nvcc({"PATH": str(other.parent)}) == str(other)
    assert find_nvcc({"CUDACXX": str(other), "CUDA_HOME": str(tmp_path / "cuda")}) == str(other)


def test_hip_and_vulkan_say_what_is_missing() -> None:
    assert "hipcc cannot be found" in str(find_settings_error("hip", {"PATH": ""}))
    fault = find_settings_error("vulkan", {"PATH": ""})
    assert fault is None or "cannot be built" in fault


def test_architectures_are_told_by_option() -> None:
    told = configure_options(RECIPES["cuda"], "75;90", [])
    assert "-DCMAKE_CUDA_ARCHITECTURES=75;90" in told
    assert {"-DGGML_BACKEND_DL=ON", "-DGGML_CUDA=ON", "-DGGML_CPU=OFF", "-DGGML_NATIVE=OFF"} < set(told)
    assert not any("ARCHITECTURES" in option for option in configure_options(RECIPES["cuda"], "", []))
    assert "-DCMAKE_CXX_FLAGS=-include x" in configure_options(RECIPES["vulkan"], "", ["-include", "x"])


def test_architectures_of_a_backend_without_them_are_refused_before_anything_is_built() -> None:
    with pytest.raises(SetupError, match="vulkan pack is for all cards: leave out --architectures"):
        run_pack(["vulkan", "--architectures", "75"])


def test_a_pack_that_is_written_is_one_that_is_read(tmp_path: Path) -> None:
    library = tmp_path / RECIPES["vulkan"].library
    library.write_bytes(compiled(IS_NO_BACKEND, tmp_path))
    written = archive.write_pack(
        RECIPES["vulkan"], [library], engine_version().removeprefix("llama-cpp-python "), tmp_path / "dist"
    )
    assert written.name.startswith("layerdeck-pack-vulkan-")
    pack = PackStore(tmp_path / "packs").install(written, engine_version())
    assert pack.manifest is not None
    assert (pack.manifest.backend, pack.manifest.library) == ("Vulkan", "libggml-vulkan.so")
    assert pack.manifest.needs.words
    again = archive.write_pack(RECIPES["vulkan"], [library], "0.3.36", tmp_path / "again")
    assert [path.name for path in again.parent.iterdir()] == [again.name]


def test_a_pack_that_is_built_here_is_signed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    library = tmp_path / RECIPES["vulkan"].library
    library.write_bytes(compiled(IS_NO_BACKEND, tmp_path))
    written = archive.write_pack(
        RECIPES["vulkan"],
        [library],
        engine_version().removeprefix("llama-cpp-python "),
        tmp_path / "dist",
        partial(sign_manifest, sys.executable),
    )
    assert PackStore(tmp_path / "packs", keys=pack_keys()).read_archive(written)[1].kind == "here"


def test_what_a_library_needs() -> None:
    libraries = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libz.so" in line]
    if not libraries:
        import zlib

        libraries = [zlib.__file__] if getattr(zlib, "__file__", None) else [sys.executable]
    library = Path(libraries[0])
    assert needed_glibc(library).startswith("2.")
    assert not any(name.startswith(("libc.so", "libm.so")) for name in needed_libraries(library))


def test_what_is_not_shipped_is_left_out_of_the_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "engine-1-py3-none-any.whl"
    record = "".join(
        f"{name},sha256=x,1\n"
        for name in ("llama_cpp/lib/libggml-cpu-sapphirerapids.so", "llama_cpp/lib/libggml-cpu-zen4.so")
    )
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("llama_cpp/lib/libggml-cpu-sapphirerapids.so", "1")
        file.writestr("llama_cpp/lib/libggml-cpu-zen4.so", "2")
        file.writestr("engine-1.dist-info/RECORD", record)
    leave_out(wheel, LEFT_OUT)
    with zipfile.ZipFile(wheel) as file:
        assert file.namelist() == ["llama_cpp/lib/libggml-cpu-zen4.so", "engine-1.dist-info/RECORD"]
        assert file.read("engine-1.dist-info/RECORD").decode() == "llama_cpp/lib/libggml-cpu-zen4.so,sha256=x,1\n"
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def test_the_source_is_ggmls_part_of_the_package_and_kept(tmp_path: Path) -> None:
    """A stand-in for Python whose pip "downloads" a package that we made."""
    import tarfile

    package = tmp_path / "llama_cpp_python-9.tar.gz"
    inside = tmp_path / "llama_cpp_python-9" / "vendor" / "llama.cpp"
    for name in ("ggml/CMakeLists.txt", "ggml/src/ggml.c", "src/llama.cpp"):
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        (inside / name).write_text(name)
    with tarfile.open(package, "w:gz") as tar:
        tar.add(tmp_path / "llama_cpp_python-9", "llama_cpp_python-9")
    python = program(
        tmp_path / "python", f'while [ "$1" != --dest ]; do shift; done; cp "{package}" "$2/"; echo "$@" >&2'
    )
    found = fetch_ggml(tmp_path / "cache", "9", str(python))
    assert found is not None
    assert find_source(tmp_path / "cache", "9") == found
    assert sorted(str(path.relative_to(found)) for path in found.rglob("*") if path.is_file()) == [
        "CMakeLists.txt",
        "src/ggml.c",
    ]
    assert fetch_ggml(tmp_path / "cache", "10", str(program(tmp_path / "offline", "exit 1"))) is None


def test_the_builder_ends_with_the_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "resources.packs.build", "hip", "--source", str(tmp_path), "--engine", "1"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "hipcc cannot be found" in done.stderr
