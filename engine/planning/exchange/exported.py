"""The text that another program reads for a plan, and a sentence for each thing that it cannot say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Target = Literal["llama-server", "llama-swap", "ollama", "lmstudio", "python"]
TARGETS: tuple[Target, ...] = get_args(Target)


@dataclass(frozen=True, slots=True)
class Exported:
    """`text`: the command or the file, with a final newline. `notes`: sentences. `file_name`: proposed for saving."""

    text: str
    notes: tuple[str, ...]
    file_name: str
