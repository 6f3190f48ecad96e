"""From the stretches of a payload to a typed array."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from slimckpt.dtypes import BY_NAME, numpy_dtype
from slimckpt.encodings import decoder
from slimckpt.errors import (
    DroppedTensorError,
    NotUnderstoodError,
    OpaqueTensorError,
    SlimckptError,
    StoreDamagedError,
)
from slimckpt.model import FLOOR, HOME_PAYLOAD, RAW, Bytes, Tensor
from slimckpt.sources.backends import Backend, CopyOnWrite
from slimckpt.store.reader import NOWHERE
from slimckpt.views.providers import Holding, Stretch

Array = npt.NDArray[Any]

_CHUNK = 8 * 1024 * 1024
_MAX_NBYTES = 2**63 - 1


class Arrays:
    """Makes the arrays of one view.

    Read-only arrays are views of the backend's memory where that can be. Writable ones are views
    of private memory, one for each payload row of each file: tensors that are tied in the file
    share it, tensors whose bytes are merely equal do not.

    Notes
    -----
    Private memory lives as long as this object, so that a tensor written to is found as it was
    left.
    """

    def __init__(self, backend: Backend, writable: bool) -> None:
        self.backend = backend
        self.writable = writable
        self._private: dict[tuple[Holding, int | None, str], Array] = {}
        self._copied = CopyOnWrite(backend)

    def array(self, holding: Holding, row: int) -> Array:
        """A tensor, as numpy has it; packed dtypes as ``uint8``."""
        tensor, dtype, shape = described(holding, row)
        low, high, strides = _extent(holding, tensor, shape, dtype.itemsize)
        try:
            if 0 in shape:
                return self._finished(np.empty(shape, dtype))
            if tensor.fill is not None:
                return self._filled(holding, row, tensor, shape, dtype)
            data = self._bytes(holding, tensor, tensor.offset + low, tensor.offset + high)
            if isinstance(data, int):
                element = np.full(dtype.itemsize, data, np.uint8).view(dtype).reshape(())
                return np.broadcast_to(element, shape)
            found: Array = np.ndarray(shape, dtype, data, -low, strides)
        except ValueError as error:
            if isinstance(error, SlimckptError):
                raise
            raise NotUnderstoodError(
                f"{_name(holding, tensor)} has shape {_show(tensor.shape)}, which numpy cannot"
                f" hold: {error}; raw(name) gives its bytes"
            ) from None
        if not found.flags.aligned and found.nbytes < FLOOR and not self.writable:
            return self._finished(found.copy())
        return found

    def pieces(self, holding: Holding, row: int, check: bool) -> list[Stretch]:
        """Where the bytes are that an array is made of, in stream order; nothing where none are.

        Of an encoded tensor, all that must be decoded. Without ``check`` they need not be sound.
        """
        tensor, dtype, shape = described(holding, row)
        if tensor.nbytes == 0 or tensor.fill is not None:
            return []
        stretches = _stretches(holding, tensor, check)
        if tensor.encoding != RAW:
            return stretches
        low, high, _ = _extent(holding, tensor, shape, dtype.itemsize)
        start, stop = tensor.offset + low, tensor.offset + high
        _check_inside(holding, tensor, start, stop, sum(s.nbytes for s in stretches))
        return list(_cut(stretches, start, stop))

    def part(self, holding: Holding, tensor: Tensor, start: int, stop: int) -> Bytes:
        """Bytes ``start`` to ``stop`` of the stream of a tensor's payload, as they are stored.

        Where it lies in several pieces, these alone are copied.
        """
        data = self._stored(holding, tensor, start, stop)
        return np.full(stop - start, data, np.uint8) if isinstance(data, int) else data

    def rows(self, holding: Holding, row: int, first: int, last: int) -> Array:
        """Rows ``first`` to before ``last`` of a tensor that has at least one axis.

        Where it lies in several pieces, these alone are copied.
        """
        tensor, dtype, shape = described(holding, row)
        whole = tensor.encoding != RAW or tensor.strides is not None or tensor.payload is None
        if whole or self.writable or len(_stretches(holding, tensor)) < 2:
            return self.array(holding, row)[first:last]
        each = tensor.nbytes // shape[0]
        at = tensor.offset
        data = self.part(holding, tensor, at + first * each, at + last * each)
        return data.view(dtype).reshape(last - first, *shape[1:])

    def raw(self, holding: Holding, row: int) -> bytes:
        """The bytes of a tensor of any type, in C order, as the file stores them."""
        tensor = tensor_of(holding, row)
        if tensor.strides is not None and is_readable(tensor.dtype):
            return Arrays(self.backend, False).array(holding, row).tobytes()
        if tensor.nbytes == 0:
            return b""
        if tensor.fill is not None:
            return tensor.fill * (tensor.nbytes // max(len(tensor.fill), 1))
        stop = tensor.offset + tensor.nbytes
        data = self._stored(holding, tensor, tensor.offset, stop)
        return bytes([data]) * tensor.nbytes if isinstance(data, int) else data.tobytes()

    def same(self, one: tuple[Holding, int], other: tuple[Holding, int]) -> bool:
        """Whether two tensors have one dtype, shape and bytes: by digest where there is one."""
        a, b = tensor_of(*one), tensor_of(*other)
        if not alike(a, b) or a.nbytes != b.nbytes:
            return False
        digests = digest_of(*one), digest_of(*other)
        if None not in digests:
            return digests[0] == digests[1]
        if not is_readable(a.dtype):
            return self.raw(*one) == self.raw(*other)
        reader = self if not self.writable else Arrays(self.backend, False)
        return equal_bytes(reader.array(*one), reader.array(*other))

    def _bytes(self, holding: Holding, tensor: Tensor, start: int, stop: int) -> Bytes | int:
        """Part of the stream of a tensor's payload; an int where every byte is that."""
        if not self.writable:
            return self._stored(holding, tensor, start, stop)
        memory = self.stream(holding, tensor)
        _check_inside(holding, tensor, start, stop, len(memory))
        return memory[start:stop]

    def stream(self, holding: Holding, tensor: Tensor) -> Bytes:
        """The whole stream of a tensor's payload, decoded, in the private memory that all tensors
        of the payload share."""
        key = (holding, tensor.payload, tensor.encoding)
        memory = self._private.get(key)
        if memory is None:
            # Two threads may both get here; the first to be done decides which memory it is.
            memory = self._private.setdefault(key, self._own(holding, tensor))
        return memory

    def _own(self, holding: Holding, tensor: Tensor) -> Bytes:
        stretches = _stretches(holding, tensor)
        if tensor.encoding != RAW:
            return np.array(self._decoded(holding, tensor, stretches))
        if len(stretches) == 1:
            path, offset, nbytes, size = stretches[0]
            if path is not None:
                return self._copied.take(path, offset, nbytes, size)
        return self._gather(stretches)

    def _stored(self, holding: Holding, tensor: Tensor, start: int, stop: int) -> Bytes | int:
        stretches = _stretches(holding, tensor)
        if tensor.encoding != RAW:
            stream = self._decoded(holding, tensor, stretches)
            _check_inside(holding, tensor, start, stop, len(stream))
            return stream[start:stop]
        _check_inside(holding, tensor, start, stop, sum(s.nbytes for s in stretches))
        wanted = list(_cut(stretches, start, stop))
        if len(wanted) > 1:
            return _frozen(self._gather(wanted))
        path, offset, nbytes, size = wanted[0]
        if path is None:
            return offset
        return self.backend.view(path, offset, nbytes, size)

    def _decoded(self, holding: Holding, tensor: Tensor, stretches: list[Stretch]) -> Bytes:
        try:
            decode = decoder(tensor.encoding)
            assert tensor.payload is not None
            lengths = [span.nbytes for span in holding.table.spans(tensor.payload)]
            return _frozen(decode(_frozen(self._gather(stretches)), lengths))
        except NotUnderstoodError as error:
            raise NotUnderstoodError(f"{_name(holding, tensor)}: {error}") from None
        except MemoryError:
            raise NotUnderstoodError(
                f"{_name(holding, tensor)}: there is no memory for it decoded; it has"
                f" {tensor.nbytes} bytes"
            ) from None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            # The stored bytes are not what their encoding says, or the encoding is none.
            raise holding.damaged(f"{_name(holding, tensor)}: {error}") from None

    def _gather(self, stretches: Iterable[Stretch]) -> Bytes:
        stretches = list(stretches)
        memory = np.zeros(sum(s.nbytes for s in stretches), np.uint8)
        at = 0
        for path, offset, nbytes, size in stretches:
            if path is None:
                if offset:
                    memory[at : at + nbytes] = offset
            else:
                for done in range(0, nbytes, _CHUNK):
                    take = min(_CHUNK, nbytes - done)
                    piece = self.backend.view(path, offset + done, take, size)
                    memory[at + done : at + done + take] = piece
            at += nbytes
        return memory

    def _filled(
        self,
        holding: Holding,
        row: int,
        tensor: Tensor,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> Array:
        fill = tensor.fill or b""
        if len(fill) != dtype.itemsize:
            raise holding.damaged(
                f"{_name(holding, tensor)}: its fill value has {len(fill)} bytes, expected"
                f" {dtype.itemsize}"
            )
        element = np.frombuffer(fill, dtype).reshape(())
        if not self.writable:
            return np.broadcast_to(element, shape)
        key = (holding, None, str(row))
        memory = self._private.get(key)
        if memory is None:
            memory = self._private.setdefault(key, np.full(shape, element, dtype))
        return memory

    def _finished(self, found: Array) -> Array:
        found.flags.writeable = self.writable
        return found


def tensor_of(holding: Holding, row: int) -> Tensor:
    """A row as a tensor, checked as far as the row alone can be."""
    try:
        tensor = holding.table.tensor(row)
    except (IndexError, UnicodeDecodeError) as error:
        raise holding.damaged(f"{holding.label}: tensor {row} cannot be read: {error}") from None
    if tensor.payload is not None and not 0 <= tensor.payload < holding.table.n_payloads:
        raise holding.damaged(f"{_name(holding, tensor)}: there is no payload {tensor.payload}")
    return tensor


def digest_of(holding: Holding, row: int) -> bytes | None:
    """The digest of a tensor's bytes, where it is known."""
    table = holding.table
    columns = table.columns
    payload = int(columns["home_row"][row])
    is_payload = (
        columns["home"][row] == HOME_PAYLOAD
        and 0 <= payload < table.n_payloads
        and columns["offset"][row] == 0
        and columns["nbytes"][row] == columns["payload_nbytes"][payload]
        and table.encodings[columns["encoding"][row]] == RAW
        and columns["stride_end"][row] == (columns["stride_end"][row - 1] if row else 0)
    )
    return holding.digest(payload) if is_payload else None


def equal_bytes(one: Array, other: Array) -> bool:
    """Whether two arrays of one dtype and shape have equal bytes; copies no more than a few MiB."""
    if (
        one.nbytes > _CHUNK
        and one.ndim
        and not (one.flags.c_contiguous and other.flags.c_contiguous)
    ):
        step = max(_CHUNK * len(one) // one.nbytes, 1)
        return all(
            equal_bytes(one[at : at + step], other[at : at + step])
            if len(one) > 1
            else equal_bytes(one[0], other[0])
            for at in range(0, len(one), step)
        )
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other))
    return all(
        np.array_equal(a[at : at + _CHUNK], b[at : at + _CHUNK]) for at in range(0, len(a), _CHUNK)
    )


def described(holding: Holding, row: int) -> tuple[Tensor, np.dtype[Any], tuple[int, ...]]:
    """A tensor, and the dtype and shape of its array."""
    tensor = tensor_of(holding, row)
    if not is_readable(tensor.dtype):
        raise OpaqueTensorError(
            f"{holding.label}: {tensor.name!a} is of type {tensor.dtype}, not an array;"
            " raw(name) gives its bytes"
        )
    dtype = numpy_dtype(tensor.dtype, tensor.big_endian)
    shape = packed_shape(tensor)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != tensor.nbytes:
        raise holding.damaged(
            f"{_name(holding, tensor)}: {tensor.dtype} {_show(tensor.shape)} does not take the"
            f" {tensor.nbytes} bytes that are recorded"
        )
    return tensor, dtype, shape


def is_readable(dtype: str) -> bool:
    """Whether entries of ``dtype`` are arrays."""
    return dtype in BY_NAME


def packed_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of the array: the tensor's own, but for packed dtypes in bytes.

    The last axis is the one that is packed, where its elements end on a byte; else there is only
    one axis.
    """
    bits = BY_NAME[tensor.dtype].bits
    shape = tensor.shape
    if bits % 8 == 0:
        return shape
    if shape and shape[-1] * bits % 8 == 0:
        return (*shape[:-1], shape[-1] * bits // 8)
    return (-(-math.prod(shape) * bits // 8),)


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one type and shape."""
    return (one.dtype, one.big_endian, one.shape) == (other.dtype, other.big_endian, other.shape)


def _extent(
    holding: Holding, tensor: Tensor, shape: tuple[int, ...], itemsize: int
) -> tuple[int, int, tuple[int, ...] | None]:
    """Bytes before and behind its first element that a tensor reaches, and strides in bytes."""
    strides = tensor.strides
    if strides is None or 0 in shape:
        return 0, tensor.nbytes, None
    if len(strides) != len(shape) or shape != tensor.shape:
        raise holding.damaged(
            f"{_name(holding, tensor)}: strides {_show(strides)} do not suit its shape"
            f" {_show(tensor.shape)}"
        )
    reach = [(dim - 1) * stride for dim, stride in zip(shape, strides, strict=True)]
    low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    return low * itemsize, (high + 1) * itemsize, tuple(s * itemsize for s in strides)


def _stretches(holding: Holding, tensor: Tensor, check: bool = True) -> list[Stretch]:
    """Where a tensor's payload is, neighbours joined; an error about it names the tensor."""
    if tensor.payload is None:
        raise holding.damaged(f"{_name(holding, tensor)} has elements but no bytes")
    try:
        find = holding.stretches if check else holding.located
        found = find(tensor.payload)
    except StoreDamagedError as error:
        raise StoreDamagedError(f"tensor {tensor.name!a}: {error}") from None
    except (IndexError, ValueError) as error:
        raise holding.damaged(
            f"{_name(holding, tensor)}: where it lies cannot be read: {error}"
        ) from None
    total = sum(stretch.nbytes for stretch in found)
    if total > holding.size:
        raise holding.damaged(
            f"{_name(holding, tensor)}: its payload has {total} bytes, its file {holding.size}"
        )
    joined: list[Stretch] = []
    for stretch in found:
        if stretch.path is None and stretch.offset == NOWHERE:
            raise DroppedTensorError(
                f"{_name(holding, tensor)} was left out when it was slimmed (--drop); its bytes are"
                " not in the slim checkpoint"
            )
        if stretch.path is None and not 0 <= stretch.offset <= 255:
            raise holding.damaged(f"{_name(holding, tensor)}: {stretch.offset} is no byte")
        if joined and _goes_on(joined[-1], stretch):
            joined[-1] = joined[-1]._replace(nbytes=joined[-1].nbytes + stretch.nbytes)
        elif stretch.nbytes:
            joined.append(stretch)
    return joined


def _goes_on(one: Stretch, other: Stretch) -> bool:
    if one.path is None:
        return other.path is None and one.offset == other.offset
    return one.path == other.path and one.offset + one.nbytes == other.offset


def _cut(stretches: Iterable[Stretch], start: int, stop: int) -> Iterable[Stretch]:
    at = 0
    for stretch in stretches:
        low, high = max(start - at, 0), min(stop - at, stretch.nbytes)
        if low < high:
            offset = stretch.offset if stretch.path is None else stretch.offset + low
            yield stretch._replace(offset=offset, nbytes=high - low)
        at += stretch.nbytes


def _check_inside(holding: Holding, tensor: Tensor, start: int, stop: int, nbytes: int) -> None:
    if not 0 <= start <= stop <= nbytes:
        raise holding.damaged(
            f"{_name(holding, tensor)} takes bytes {start} to {stop} of a payload of {nbytes}"
        )


def _frozen(memory: Bytes) -> Bytes:
    memory.flags.writeable = False
    return memory


def _name(holding: Holding, tensor: Tensor) -> str:
    return f"{holding.label}: tensor {tensor.name!a}"


def _show(shape: tuple[int, ...]) -> str:
    return str(list(shape)) if len(shape) <= 16 else f"of {len(shape)} dimensions"
