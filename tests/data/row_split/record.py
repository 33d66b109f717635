"""Records how ggml-sycl splits rows: compiles its functions, runs them with made-up devices, writes `rows.json`.

`python -m tests.data.row_split.record LLAMA_CPP` needs the sources of llama.cpp and g++, but neither SYCL nor a card:
the functions are arithmetic. `tests/engine/planning/memory/test_row_split.py` compares our arithmetic with the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FUNCTIONS = ("get_row_rounding", "get_row_split", "ggml_nbytes_split")
SHARES = ([3, 1], [1, 1], [1, 2, 5], [50, 30, 20], [97, 3], [1, 0, 1])
SHAPES = ([256, 256], [4096, 4096], [4096, 14336], [14336, 4096], [4096], [100, 300], [4096, 1000], [160, 77])
TYPES = {"F32": (1, 4), "F16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_K": (256, 144), "Q6_K": (256, 210)}

PROGRAM = """
#include <array>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include "ggml.h"
#define GGML_SYCL_MAX_DEVICES 16
#define VER_GEN9 700
#define MATRIX_ROW_PADDING 512
static struct { int device_count; struct { int cc; } devices[GGML_SYCL_MAX_DEVICES]; } g_info;
static auto & ggml_sycl_info() { return g_info; }
#undef GGML_ABORT
#define GGML_ABORT(...) abort()
%s
int main(int argc, char ** argv) {
    // Arguments: type, bytes of a row, bytes of the padding, columns, rows, shares.
    ggml_tensor t = {};
    t.type = (ggml_type) atoi(argv[1]);
    row_bytes = atoll(argv[2]); padding_bytes = atoll(argv[3]);
    t.ne[0] = atoll(argv[4]); t.ne[1] = atoll(argv[5]); t.ne[2] = t.ne[3] = 1;
    g_info.device_count = argc - 6;
    std::array<float, GGML_SYCL_MAX_DEVICES> split = {};
    float sum = 0.0f; // as in ggml_backend_sycl_split_buffer_type
    for (int i = 0; i < g_info.device_count; ++i) {
        g_info.devices[i].cc = 1255; // an Arc card
        split[i] = sum;
        sum += atof(argv[6 + i]);
    }
    for (int i = 0; i < g_info.device_count; ++i) split[i] /= sum;
    for (int i = 0; i < g_info.device_count; ++i) {
        int64_t low, high;
        get_row_split(&low, &high, &t, split, i);
        // as in ggml_backend_sycl_split_buffer_type_get_alloc_size
        size_t size = high == low ? 0 : ggml_nbytes_split(&t, high - low);
        if (high != low && t.ne[0] %% MATRIX_ROW_PADDING != 0)
            size += ggml_row_size(t.type, MATRIX_ROW_PADDING - t.ne[0] %% MATRIX_ROW_PADDING);
        printf("%%lld %%zu\\n", (long long) (high - low), size);
    }
}
"""


def function(source: str, name: str) -> str:
    """Return the text of a static function."""
    start = source.index(f" {name}(")
    start = source.rindex("static ", 0, start + 1)
    return source[start : source.index("\n}\n", start) + 3]


def main() -> None:
    root = Path(sys.argv[1])
    source = (root / "ggml/src/ggml-sycl/ggml-sycl.cpp").read_text()
    parts = "\n".join(function(source, name) for name in FUNCTIONS)
    stubs = (
        "static int64_t row_bytes, padding_bytes;\n"
        "static int64_t stub_nrows(const ggml_tensor * t) { return t->ne[1] * t->ne[2] * t->ne[3]; }\n"
        "#define ggml_nrows stub_nrows\n"
    )
    # The one caller of ggml_row_size in these functions asks for the whole row, the one in main for the padding.
    parts = parts.replace("ggml_row_size(tensor->type, tensor->ne[0])", "row_bytes")
    body = (PROGRAM % (stubs + parts)).replace(
        "ggml_row_size(t.type, MATRIX_ROW_PADDING - t.ne[0] % MATRIX_ROW_PADDING)", "padding_bytes"
    )
    numbers = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        file, program = Path(folder) / "rows.cpp", Path(folder) / "rows"
        file.write_text(body)
        subprocess.run(["g++", "-std=c++17", "-I", root / "ggml/include", file, "-o", program], check=True)
        for name, (block, block_bytes) in TYPES.items():
            for shape in SHAPES:
                columns, rows = (*shape, 1)[:2]
                if columns % block:
                    continue
                padding = (512 - columns % 512) // block * block_bytes
                row = columns // block * block_bytes
                for shares in SHARES:
                    words = [numbers[name], row, padding, columns, rows, *shares]
                    said = subprocess.run([program, *map(str, words)], capture_output=True, text=True, check=True)
                    found = [list(map(int, line.split())) for line in said.stdout.splitlines()]
                    cases.append({"type": name, "shape": shape, "shares": shares, "rows_bytes": found})
    (HERE / "rows.json").write_text("[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n")


if __name__ == "__main__":
    main()
