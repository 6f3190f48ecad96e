"""DTensors in files of torch: what the spec beside each local tensor says.

As torch 2.13 pickles them (``torch/distributed/tensor/_api.py``, ``_dtensor_spec.py``,
``placement_types.py``, ``torch/distributed/device_mesh.py``): ``_rebuild_from_type_v2`` of the
class DTensor with the state ``{"_local_tensor": …, "_spec": DTensorSpec}``. Before 2.5 modules were
called ``torch.distributed._tensor``. A mesh is the ranks of its root (``_flatten_rank_map``) and
sizes and strides in them (``_layout``), one axis a pair from 2.13 on; before, a tensor ``mesh`` and
its elements again as ``_flatten_mesh_list``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

from slimckpt.errors import NotUnderstoodError
from slimckpt.formats.collector import uncollected
from slimckpt.formats.numpy_arrays import Shape, is_shape
from slimckpt.formats.objects import Part, Trail, Walk
from slimckpt.formats.pickles import Call, Global, PickleReader, fields_of, pairs_of
from slimckpt.formats.torch_files import archives_of, read_archive, read_legacy
from slimckpt.formats.torch_tensors import DTENSOR_NAMESPACES, is_dtensor, plain, rebuilt
from slimckpt.sources.positioned import ByteSource

SHARD, STRIDED, REPLICATE = "Shard", "_StridedShard", "Replicate"
_MOST_PARTS = 1 << 16


class Mesh(NamedTuple):
    """Ranks in a grid: ``ranks`` in C order of ``shape``. ``saver`` is the rank that wrote the
    file, where the mesh says so."""

    shape: Shape
    ranks: tuple[int, ...]
    saver: int | None

    def coordinates(self, rank: int) -> Shape | None:
        """Where a rank is; ``None`` where it is not in the mesh."""
        if rank not in self.ranks:
            return None
        number, found = self.ranks.index(rank), []
        for size in reversed(self.shape):
            number, at = divmod(number, size)
            found.append(at)
        return tuple(reversed(found))


class Placement(NamedTuple):
    """What one axis of the mesh does: ``kind`` is the name of its class. ``factor`` is the
    ``split_factor`` of a ``_StridedShard``, else 1."""

    kind: str
    dim: int = 0
    factor: int = 1


class Spec(NamedTuple):
    """How a DTensor lies on its mesh.

    Attributes
    ----------
    shape
        Of the whole tensor.
    placements
        One for each axis of the mesh.
    order
        Axes of the mesh that split an axis of the tensor, the first one first, by that axis; empty
        where the file does not say.
    """

    mesh: Mesh
    shape: Shape
    placements: tuple[Placement, ...]
    order: dict[int, Shape]


def specs_in(name: str, source: ByteSource) -> dict[str, Spec | str]:
    """The specs of the DTensors of a file, by the names of the local tensors; a text says what
    about one cannot be understood.

    Parameters
    ----------
    name
        Of the format of the file.

    Raises
    ------
    DamagedFileError, NotUnderstoodError
        The file is damaged, or too deep to be walked.
    """
    found: dict[str, Spec | str] = {}
    meshes: dict[int, Mesh] = {}

    def visit(trail: Trail, node: Any) -> Iterable[Part] | None:
        if is_dtensor(node):
            text = walk.texts(trail)[0]
            try:
                found[text] = _spec(node, meshes)
            except NotUnderstoodError as error:
                found[text] = str(error)
            return ()
        tensor, parts = rebuilt(node)
        return parts if tensor is not None or parts else None

    with uncollected():
        if name == "torch-legacy":
            legacy = read_legacy(source)
            root, reader = legacy.root, legacy.reader
        else:
            reader = PickleReader(*read_archive(archives_of(source)[0]).opened())
            root = reader.read()
        walk = Walk(source.label, reader.nbytes)
        walk(root, visit)
    return found


def _spec(node: Call, meshes: dict[int, Mesh]) -> Spec:
    """The spec of a call that :func:`~slimckpt.formats.torch_tensors.is_dtensor`."""
    arguments, state = node.args[2], node.args[3]
    outer = [
        pair for part in (state if type(state) is tuple else (state,)) for pair in pairs_of(part)
    ]
    spec = fields_of(next((value for key, value in outer if key == "_spec"), None))
    shape = plain(arguments[2]) if type(arguments) is tuple and len(arguments) > 2 else None
    meta = spec.get("tensor_meta")
    if type(meta) is Call and type(meta.args) is tuple and meta.args:
        said = plain(meta.args[0])
        if said != shape:
            raise NotUnderstoodError(
                f"expected shape {shape!a}, as the DTensor has, found {said!a}"
            )
    if not is_shape(shape):
        raise NotUnderstoodError("expected the shape of the whole tensor, found none")
    made = spec.get("mesh")
    if id(made) not in meshes:
        meshes[id(made)] = _mesh(fields_of(made))
    mesh, given = meshes[id(made)], plain(spec.get("placements"))
    if type(given) is not tuple or len(given) != len(mesh.shape):
        raise NotUnderstoodError(
            f"expected a placement for each axis of its mesh of {list(mesh.shape)}, found"
            f" {len(given) if type(given) is tuple else 'none'}"
        )
    placements = tuple(_placement(each, shape) for each in given)
    return Spec(mesh, shape, placements, _order(spec.get("shard_order")))


def _placement(node: Any, shape: Shape) -> Placement:
    what = node.what if type(node) is Call else None
    if type(what) is not Global or not what.module.startswith(DTENSOR_NAMESPACES):
        raise NotUnderstoodError(f"expected a placement of torch, found {str(what)[:99]!a}")
    if what.name not in (SHARD, STRIDED, REPLICATE):
        return Placement(what.name)
    if what.name == REPLICATE:
        return Placement(REPLICATE)
    fields = fields_of(node)
    dim, factor = fields.get("dim"), fields.get("split_factor", 1)
    if type(dim) is not int or not 0 <= dim < len(shape):
        raise NotUnderstoodError(
            f"expected {what.name} of an axis of {list(shape)}, found axis {dim!a}"
        )
    if type(factor) is not int or not 1 <= factor <= _MOST_PARTS:
        raise NotUnderstoodError(f"expected a split_factor of 1 to {_MOST_PARTS}, found {factor!a}")
    return Placement(what.name, dim, factor)


def _order(node: Any) -> dict[int, Shape]:
    """``(ShardOrderEntry(tensor_dim, mesh_dims), …)``."""
    found = {}
    for entry in node if type(node) is tuple else ():
        values = entry.args if type(entry) is Call and type(entry.args) is tuple else ()
        if len(values) != 2 or type(values[0]) is not int or not is_shape(values[1]):
            raise NotUnderstoodError("expected the order of its splits, found something else")
        found[values[0]] = values[1]
    return found


def _mesh(fields: dict[str, Any]) -> Mesh:
    saver = fields.get("_rank")
    saver = saver if type(saver) is int else None
    ranks = plain(fields.get("_flatten_rank_map"))
    if is_shape(ranks):
        axes = _axes(fields_of(fields.get("_layout")))
        at = fields.get("_coordinate_on_dim")
        mesh = _sub_mesh(axes, ranks, saver)
    else:
        tensor, _ = rebuilt(fields.get("mesh"))
        ranks, at = plain(fields.get("_flatten_mesh_list")), plain(fields.get("_coordinate_on_dim"))
        if tensor is None or not is_shape(ranks) or math.prod(tensor.shape) != len(ranks):
            raise NotUnderstoodError(
                "expected a DeviceMesh that lists its ranks, as torch 2.3 and later write it,"
                " found none"
            )
        mesh = Mesh(tensor.shape, ranks, saver)
    if len(set(mesh.ranks)) != len(mesh.ranks) or not mesh.ranks:
        raise NotUnderstoodError(f"expected a mesh of different ranks, found {mesh.ranks[:16]}")
    at = plain(at)
    if saver is None and is_shape(at) and len(at) == len(mesh.shape):
        index = 0
        for size, place in zip(mesh.shape, at, strict=True):
            index = index * size + place
        if index < len(mesh.ranks):
            mesh = mesh._replace(saver=mesh.ranks[index])
    return mesh


Axis = tuple[tuple[int, int], ...]
"""Sizes and strides that one axis of a mesh is made of."""


def _axes(layout: dict[str, Any]) -> list[Axis]:
    """The axes of a ``_MeshLayout``: each a ``_FlatLayout`` (2.13), or before that sizes and
    strides of all, those of an axis made of several in a tuple."""
    each = plain(layout.get("axes"))
    if type(each) is tuple:
        pairs = [(f.get("shape"), f.get("stride")) for f in map(fields_of, each)]
    else:
        sizes, strides = (_tuple(layout.get(key)) for key in ("shape", "stride"))
        pairs = list(zip(sizes, strides, strict=False)) if len(sizes) == len(strides) else []
    axes = []
    for size, stride in pairs:
        sizes, strides = _tuple(size), _tuple(stride)
        if not is_shape(sizes) or not is_shape(strides) or len(sizes) != len(strides):
            pairs = []
            break
        axes.append(tuple(zip(sizes, strides, strict=True)))
    if not pairs:
        raise NotUnderstoodError("expected the sizes and strides of its mesh, found none")
    return axes


def _tuple(value: Any) -> tuple[Any, ...]:
    found = plain(value)
    return found if type(found) is tuple else (found,)


def _sub_mesh(axes: list[Axis], ranks: tuple[int, ...], saver: int | None) -> Mesh:
    """The mesh of some axes of a root whose ranks are listed: that of the rank that saved it."""
    flat = [pair for axis in axes for pair in axis]
    shape = tuple(math.prod(size for size, _ in axis) for axis in axes)
    if math.prod(shape) > len(ranks) or any(size < 1 for size, _ in flat):
        raise NotUnderstoodError(f"expected a mesh in {len(ranks)} ranks, found one of {shape}")
    start = 0
    if math.prod(shape) < len(ranks):
        if saver not in ranks:
            raise NotUnderstoodError(
                f"expected a mesh with the rank that saved it, {saver}, found ranks {ranks[:16]}"
            )
        start = number = ranks.index(saver)
        start -= sum(number // stride % size * stride for size, stride in flat if stride)
    places = [
        start + sum(index * stride for index, (_, stride) in zip(at, flat, strict=True))
        for at in product(*(range(size) for size, _ in flat))
    ]
    if min(places) < 0 or max(places) >= len(ranks):
        raise NotUnderstoodError(f"expected a mesh in {len(ranks)} ranks, found {places[:16]}")
    return Mesh(shape, tuple(ranks[place] for place in places), saver)
