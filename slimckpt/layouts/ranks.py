"""The same state on another number of ranks, where the number alone says how it lies there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slimckpt.errors import UsageError
from slimckpt.layouts.boxes import blocks_of
from slimckpt.layouts.deepspeed import deepspeed_layout
from slimckpt.layouts.files import File
from slimckpt.layouts.layout import Box, Layout, Shape, Shard, TensorLayout
from slimckpt.layouts.placement import Placement
from slimckpt.layouts.splits import Split


def at_ranks(files: Sequence[File], layout: Layout, n_ranks: int) -> Layout:
    """A layout of a step on another number of ranks.

    States of DeepSpeed lie as it would lay them. Otherwise each tensor has to be whole everywhere,
    or split along one axis into a part for each of its holders (pure data or tensor parallelism,
    FSDP): it is split along that axis again, by ``ceil``.

    Parameters
    ----------
    files
        Of the step.
    layout
        How they hold it.

    Raises
    ------
    UsageError
        The number alone does not say it: tensors are split over a part of the ranks, over several
        axes, or are fused.
    """
    if n_ranks < 1:
        raise UsageError(f"a number of ranks is at least 1, not {n_ranks}")
    known = deepspeed_layout(files, n_ranks)
    if known is not None:
        return known
    return Layout(_Spread(layout, n_ranks), tuple(range(n_ranks)), f"{n_ranks} ranks")


class _Spread(Mapping[str, TensorLayout]):
    """Tensors split along the axis along which they were."""

    def __init__(self, layout: Layout, n_ranks: int) -> None:
        self._layout, self._n_ranks = layout, n_ranks
        self._made: dict[str, TensorLayout] = {}
        self._shards: dict[tuple[Shape, tuple[Split, ...]], tuple[Shard, ...]] = {}

    def __len__(self) -> int:
        return len(self._layout.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._layout.tensors

    def __getitem__(self, name: str) -> TensorLayout:
        if name not in self._made:
            tensor = self._layout.tensors[name]
            key = tensor.shape, self._splits(name, tensor)
            if key not in self._shards:
                self._shards[key] = Placement((self._n_ranks,), key[1]).shards(tensor.shape)
            self._made[name] = TensorLayout(tensor.dtype, tensor.shape, self._shards[key])
        return self._made[name]

    def _splits(self, name: str, tensor: TensorLayout) -> tuple[Split, ...]:
        boxes: dict[Box, None] = {}
        holders = set()
        for shard in tensor.shards:
            blocks = [block for piece in shard.pieces for block in blocks_of(piece)]
            full = [block.box for block in blocks if 0 not in block.box.lengths]
            boxes.update(dict.fromkeys(full))
            if len(full) > 1:
                raise self._unclear(name, tensor, "its parts are of several boxes (it is fused)")
            if full:
                holders.add(shard.holder)
        axes = [
            axis
            for axis, dim in enumerate(tensor.shape)
            if any(box.lengths[axis] != dim for box in boxes)
        ]
        splits: tuple[Split, ...] = ()
        if len(axes) > 1:
            raise self._unclear(name, tensor, f"it is split over axes {axes}")
        if axes:
            ranks = self._layout.ranks
            if len(boxes) < len(holders) or (ranks and len(holders) < len(ranks)):
                parts = f"it is in {len(boxes)} parts on {len(ranks or holders)} ranks"
                if not self._may_be_empty(tensor, axes[0], len(ranks or holders)):
                    raise self._unclear(name, tensor, parts)
            splits = (Split(axes[0], (0,), "ceil"),)
        return splits

    def _may_be_empty(self, tensor: TensorLayout, axis: int, n_ranks: int) -> bool:
        """Whether by ``ceil`` the last ranks would hold nothing, as here they do."""
        step = -(-tensor.shape[axis] // n_ranks)
        return -(-tensor.shape[axis] // step) == len(
            {
                s.pieces[0].box
                for s in tensor.shards
                if s.pieces and 0 not in s.pieces[0].box.lengths
            }
        )

    def _unclear(self, name: str, tensor: TensorLayout, why: str) -> UsageError:
        return UsageError(
            f"{self._n_ranks} ranks do not say how tensor {name!a} of shape {list(tensor.shape)} is"
            f" to lie: {why}. Say it: --layout FILE (`slimckpt layout` prints one to edit), or"
            " --strategy FILE of MindSpore"
        )
