"""A byte-level vocabulary: every UTF-8 text becomes tokens and comes back unchanged."""

from __future__ import annotations

from dataclasses import dataclass

import gguf

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
SPACE = "\u2581"
"""SentencePiece writes a space as this; as a token of its own a space stays one token."""
TURN_MARKERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_NORMAL = int(gguf.TokenType.NORMAL)
_CONTROL = int(gguf.TokenType.CONTROL)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens in order of their ids, with llama.cpp's token types; all of them score equally."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    def id_of(self, token: str) -> int:
        return self.tokens.index(token)


def byte_token(value: int) -> str:
    """Return the token that stands for one byte."""
    return f"<0x{value:02X}>"


def byte_vocabulary(size: int | None = None) -> Vocabulary:
    """Return the smallest byte vocabulary, or one filled up with unused words to `size` tokens."""
    tokens = [UNKNOWN, BEGIN, END, *(byte_token(value) for value in range(256)), SPACE, *TURN_MARKERS]
    types = [int(gguf.TokenType.UNKNOWN), _CONTROL, _CONTROL, *[int(gguf.TokenType.BYTE)] * 256, _NORMAL]
    types += [_CONTROL] * len(TURN_MARKERS)
    n_missing = 0 if size is None else size - len(tokens)
    if n_missing < 0:
        raise ValueError(f"a byte vocabulary has at least {len(tokens)} tokens, {size} were asked for")
    tokens += [f"{SPACE}word{number}" for number in range(n_missing)]
    types += [_NORMAL] * n_missing
    return Vocabulary(tuple(tokens), tuple(types))


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """Write the tokenizer metadata that llama.cpp needs for `vocabulary`."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_scores([0.0] * len(vocabulary))
    writer.add_token_types(list(vocabulary.types))
    writer.add_bos_token_id(vocabulary.id_of(BEGIN))
    writer.add_eos_token_id(vocabulary.id_of(END))
    writer.add_eot_token_id(vocabulary.id_of("<|end|>"))
    writer.add_unk_token_id(vocabulary.id_of(UNKNOWN))
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)
