"""How a payload's stored bytes become the stream that tensors view: one decoder an encoding.

An encoding is a name, or ``name:parameters``. A decoder takes the stored bytes and the parameters
and returns the decoded stream, in memory of its own unless nothing had to be decoded.
"""

from __future__ import annotations

from collections.abc import Callable

from slimckpt.errors import NotUnderstoodError
from slimckpt.model import RAW, Bytes

Decoder = Callable[[Bytes, str], Bytes]


def _raw(stored: Bytes, parameters: str) -> Bytes:
    return stored


DECODERS: dict[str, Decoder] = {RAW: _raw}


def decoder(encoding: str) -> Callable[[Bytes], Bytes]:
    """The function that decodes ``encoding``.

    Raises
    ------
    NotUnderstoodError
        The encoding is unknown; the message names it.
    """
    name, _, parameters = encoding.partition(":")
    found = DECODERS.get(name)
    if found is None:
        raise NotUnderstoodError(
            f"its bytes are encoded in a way ({encoding!a}) that this slimckpt does not know;"
            " a newer one may"
        )
    return lambda stored: found(stored, parameters)
