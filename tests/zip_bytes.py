"""Zip archives in memory: as Python makes them, and bent out of shape."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping
from typing import Any


def zip_file(
    members: Mapping[str, bytes],
    deflated: Iterable[str] = (),
    *,
    zip64: bool = False,
    streamed: bool = False,
) -> bytes:
    """An archive of ``members``; ``streamed`` writes sizes behind them (data descriptors)."""
    memory: Any = _Unseekable() if streamed else io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, body in members.items():
            about = zipfile.ZipInfo(name)
            about.compress_type = zipfile.ZIP_DEFLATED if name in deflated else zipfile.ZIP_STORED
            with archive.open(about, "w", force_zip64=zip64) as file:
                file.write(body)
    return memory.getvalue()


class _Unseekable(io.BytesIO):
    def seek(self, *arguments: Any) -> int:
        raise OSError("cannot seek")

    def tell(self) -> int:
        raise OSError("cannot tell")

    def seekable(self) -> bool:
        return False
