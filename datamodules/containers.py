"""What an audio file's own container says about it: is this audio, and is the file all there.

libsndfile shortens a cut WAV or Ogg without a word, so the few bytes that tell are read here. RIFF: Microsoft and IBM,
Multimedia Programming Interface 1.0. Ogg: RFC 3533, section 6.
"""

from __future__ import annotations

import struct
from pathlib import Path

STREAMED_SIZES = (0, 0xFFFFFFFF, 0x7FFFFFFF, 0x7FFFF000, 0xFFFFFFFF - 36, 0x7FFFFFFF - 36)
OGG_TAIL_BYTES = 1 << 17
OGG_PAGE_HEADER = 27
OGG_LAST_PAGE = 4


def looks_like_audio(path: Path) -> bool:
    """Whether a file's first bytes are those of WAV, RF64, FLAC, Ogg, AIFF, CAF, AU or a tagged MP3."""
    try:
        with path.open("rb") as file:
            head = file.read(12)
    except OSError:
        return False
    if head[:4] in (b"RIFF", b"RF64"):
        return head[8:12] == b"WAVE"
    if head[:4] == b"FORM":
        return head[8:12] in (b"AIFF", b"AIFC")
    return head[:4] in (b"fLaC", b"OggS", b"caff", b".snd") or head[:3] == b"ID3"


def cut_short(path: Path) -> str | None:
    """Say whether the container promises more than the file holds.

    Returns:
        The reason, or None where nothing is known to be missing.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(12)
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        return _wav_cut(path)
    if head[:4] == b"OggS":
        return _ogg_cut(path)
    return None


def _wav_cut(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        place = 12
        while place + 8 <= size:
            file.seek(place)
            name, length = struct.unpack("<4sI", file.read(8))
            if name == b"data":
                if length not in STREAMED_SIZES and place + 8 + length > size:
                    return f"cut short: its header promises {length} bytes of samples, {size - place - 8} are there"
                return None
            place += 8 + length + length % 2
    return None  # no samples found: the decoder's word decides


def _ogg_cut(path: Path) -> str | None:
    """The last page must be whole and, in a file of several pages, marked as the stream's last."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(size - OGG_TAIL_BYTES, 0))
        tail = file.read()
    place = tail.rfind(b"OggS")
    if place < 0:
        return None  # not Ogg to its end: the decoder's error says more
    page = tail[place:]
    if len(page) < OGG_PAGE_HEADER or len(page) < OGG_PAGE_HEADER + page[26]:
        return "cut short: it ends inside a page header"
    body = sum(page[OGG_PAGE_HEADER : OGG_PAGE_HEADER + page[26]])
    if len(page) < OGG_PAGE_HEADER + page[26] + body:
        return "cut short: it ends inside a page"
    if not page[5] & OGG_LAST_PAGE:
        return "cut short: its last page is not marked as the last"
    return None
