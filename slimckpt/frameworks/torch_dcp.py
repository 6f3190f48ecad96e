"""torch.distributed.checkpoint reads from a slim checkpoint: a ``StorageReader``.

As torch 2.13's ``FileSystemReader`` (``torch/distributed/checkpoint/filesystem.py``), but nothing
is unpickled: metadata and objects are made by allowed constructors, and tensors are mapped.

This module imports torch; it is imported only where torch is asked for.
"""

from __future__ import annotations

import io
import os
import uuid
from typing import Any

import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from slimckpt.errors import CheckFailedError, UsageError
from slimckpt.formats.base import DCP
from slimckpt.formats.dcp_metadata import METADATA
from slimckpt.frameworks.construct import Constructor
from slimckpt.frameworks.origin import Origin, Payloads, split, step_of
from slimckpt.frameworks.torch_names import allowed_of_torch
from slimckpt.frameworks.torch_objects import Objects
from slimckpt.layouts.boxes import coverage
from slimckpt.layouts.covering import show_box
from slimckpt.layouts.layout import Box, whole_box
from slimckpt.model import StepLabel, encode_path
from slimckpt.sources.backends import BackendName
from slimckpt.sources.positioned import Section
from slimckpt.views.arrays import Arrays
from slimckpt.views.checkpoint import Checkpoint, Path
from slimckpt.views.providers import Member

_NO_METADATA = (
    "; what its HuggingFaceStorageWriter saved has none: mount it and load it with"
    " HuggingFaceStorageReader, or take whole tensors from slimckpt.open(…).tensor(name)"
)


_SAVED = (TensorStorageMetadata, BytesStorageMetadata)


class SlimReader(StorageReader):  # type: ignore[misc]  # torch has no types here
    """What ``torch.distributed.checkpoint.load`` reads with; made by
    :func:`slimckpt.frameworks.torch.StorageReader`."""

    def __init__(
        self,
        path: Path,
        step: StepLabel | None,
        run: str | None,
        directory: Path | None,
        allow: tuple[Any, ...],
        backend: BackendName | None,
        check: bool,
    ) -> None:
        root, inner = split(path)
        if inner is not None and directory is not None:
            raise UsageError(f"{os.fsdecode(path)!a} names a directory already")
        wanted = inner if directory is None else os.fsencode(directory)
        self._checkpoint = Checkpoint(root, backend, check)
        self._member = self._described(step, run, wanted)
        self._allow = allow
        self._stored: dict[Any, Any] = {}
        self._load_id = uuid.uuid4().hex

    def _described(self, step: StepLabel | None, run: str | None, wanted: bytes | None) -> Member:
        """The metadata of the checkpoint that is meant."""
        if wanted is not None:
            path = os.path.normpath(os.path.join(wanted, METADATA.encode()))
            found = self._checkpoint.files.member(path)
            found.holding.require()
            return found
        chosen = step_of(self._checkpoint, step, run)
        members = [m for m in chosen.members if os.path.basename(m.path) == METADATA.encode()]
        members = [m for m in members if m.holding.file.facts.get("describes") == DCP]
        if len(members) == 1:
            return members[0]
        where = ", ".join(ascii(encode_path(os.path.dirname(m.path))) for m in members)
        raise UsageError(
            f"{chosen._what} has {len(members)} files {METADATA} of torch.distributed.checkpoint"
            + (f"; say directory=…: {where}" if members else _NO_METADATA)
        )

    def reset(self, checkpoint_id: Any = None) -> None:
        self._stored = {}
        self._load_id = uuid.uuid4().hex

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was saved: tensors, their chunks, and where they lie."""
        allowed = allowed_of_torch(torch, None, self._allow)
        with self._member.holding.source() as source:
            found = Constructor(source, 0, source.size, allowed=allowed).read()
        if not isinstance(found, Metadata):
            raise CheckFailedError(
                f"{self._member.holding.label}: expected {DCP}.metadata.Metadata, found a"
                f" {type(found).__name__}"
            )
        if not _is_sound(found):
            raise CheckFailedError(
                f"{self._member.holding.label}: it does not say what was saved, and where, as"
                " torch.distributed.checkpoint does"
            )
        self._require_covered(found)
        if getattr(found, "storage_meta", None) is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self._load_id
        return found

    def _require_covered(self, found: Metadata) -> None:
        """Chunks make up all of each tensor: what no chunk has would stay as it was, silently."""
        for name, saved in found.state_dict_metadata.items():
            if isinstance(saved, TensorStorageMetadata):
                boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in saved.chunks]
                shape = tuple(saved.size)
                gap = None if boxes == [whole_box(shape)] else coverage(shape, boxes).gap
                if gap is not None:
                    raise CheckFailedError(
                        f"{self._member.holding.label}: no chunk has {show_box(gap)} of tensor"
                        f" {name!a} of shape {list(shape)}; a part of the save is missing"
                    )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._stored = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Bring what the plan asks for to where the planner wants it, in the order in which it
        lies in the files."""
        directory = os.path.dirname(self._member.path)
        by_file: dict[str, list[tuple[int, int, ReadItem]]] = {}
        for item in plan.items:
            place = self._stored.get(item.storage_index)
            if place is None:
                raise CheckFailedError(
                    f"{self._member.holding.label}: it lists {item.storage_index.fqn!a}, but not"
                    f" where the chunk at {item.storage_index.offset} is"
                )
            if getattr(place, "transform_descriptors", None):
                raise CheckFailedError(
                    f"{self._member.holding.label}: {item.storage_index.fqn!a} was transformed when"
                    f" it was saved ({place.transform_descriptors}); restore the checkpoint and"
                    " load it with torch's own reader"
                )
            by_file.setdefault(place.relative_path, []).append((place.offset, place.length, item))
        for name, items in sorted(by_file.items()):
            member = self._checkpoint.files.member(os.path.join(directory, os.fsencode(name)))
            self._read_file(member, sorted(items, key=lambda item: item[0]), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(
        self, member: Member, items: list[tuple[int, int, ReadItem]], planner: LoadPlanner
    ) -> None:
        member.holding.require()
        origin = Origin(self._checkpoint, member, Arrays(self._checkpoint._backend, True))
        with member.holding.source() as source:
            objects = Objects(torch, Payloads(origin, source.read), self._allow)
            for offset, nbytes, item in items:
                found = objects.of_archive(Section(source, offset, nbytes))
                if item.type == LoadItemType.BYTE_IO:
                    # The planner unpickles what it gets, so it gets what was made here.
                    content = io.BytesIO()
                    torch.save(found, content)
                    content.seek(0)
                    planner.load_bytes(item, content)
                else:
                    self._copy(found, item, planner)

    def _copy(self, found: Any, item: ReadItem, planner: LoadPlanner) -> None:
        what = f"{self._member.holding.label}: tensor {item.storage_index.fqn!a}"
        if not isinstance(found, torch.Tensor):
            raise CheckFailedError(f"{what}: expected a tensor, found a {type(found).__name__}")
        for axis, (offset, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            if offset + size > found.size(axis):
                raise CheckFailedError(
                    f"{what}: its chunk of shape {list(found.shape)} has no {offset + size}"
                    f" elements on axis {axis}; the metadata is of another save"
                )
            found = found.narrow(axis, offset, size)
        target = planner.resolve_tensor(item).detach()
        if target.size() != found.size():
            raise CheckFailedError(
                f"{what}: expected shape {list(target.shape)}, found {list(found.shape)}"
            )
        target.copy_(found)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _is_sound(found: Metadata) -> bool:
    """Whether metadata have the parts that are used here."""
    saved = getattr(found, "state_dict_metadata", None)
    stored = getattr(found, "storage_data", None)
    return (
        isinstance(saved, dict)
        and isinstance(stored, dict)
        and all(
            isinstance(v, (TensorStorageMetadata, BytesStorageMetadata)) for v in saved.values()
        )
        and all(
            isinstance(getattr(place, "relative_path", None), str)
            and type(getattr(place, "offset", None)) is int
            and type(getattr(place, "length", None)) is int
            for place in stored.values()
        )
    )
