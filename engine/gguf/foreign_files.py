"""Says what a file is that people take for a GGUF model."""

from __future__ import annotations

from engine.language import tr

_GGML_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_CONVERT = tr("convert it to GGUF with llama.cpp's convert_hf_to_gguf.py")


def describe_foreign_file(start: bytes) -> str:
    """Return a sentence for a file that begins with `start` (up to 512 bytes) and not with GGUF's magic."""
    if not start.strip(b"\0"):
        return tr("holds only zero bytes at its start; the download is incomplete")
    if start[:4] in _GGML_MAGICS:
        return tr("is in GGML's old format, from before GGUF; get the model as GGUF")
    if start[:4] == b"PK\x03\x04":
        return tr("is a zip archive or a PyTorch checkpoint, not GGUF; {convert}", convert=_CONVERT)
    if start[:2] == b"\x80\x02" or start[:2] == b"\x80\x04":
        return tr("is a Python pickle (a PyTorch checkpoint), not GGUF; {convert}", convert=_CONVERT)
    if start[8:9] == b"{" and start[4:8] == b"\0\0\0\0":
        return tr("is a safetensors file, not GGUF; {convert}", convert=_CONVERT)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return tr("is a web page, not GGUF; download the file itself, not its page")
    if text.startswith(b"version https://git-lfs"):
        return tr("is a Git LFS pointer, not the model; fetch it with `git lfs pull`")
    if text.startswith((b"{", b"[")):
        return tr("is a JSON file, not GGUF")
    return tr("is not a GGUF file")
