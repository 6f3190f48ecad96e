"""What a slim checkpoint will hold, decided before a byte is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from slimckpt.analysis.categories import OPTIMIZER
from slimckpt.analysis.dropping import Codes, dropped_tensors, payloads_of
from slimckpt.analysis.roles import role_of, step_key
from slimckpt.analysis.sharing import Bodies, Sharing, first_users
from slimckpt.analysis.tree import Tree
from slimckpt.model import Role, StepLabel, compact_ranks
from slimckpt.rewrite.access import Access, Guard
from slimckpt.rewrite.naming import Names
from slimckpt.sources.digest import BLOCK, DIGEST
from slimckpt.store.container import LARGE, PAGE, SMALL_ALIGNMENT
from slimckpt.store.index import FileIndex, Places
from slimckpt.store.manifest import OtherEntry
from slimckpt.store.writer import extras_nbytes

MAX_CONTAINER = 64 * 2**30
SMALL_SET = 16 * 2**20
"""Replica sets with fewer bytes are joined."""
MAX_LINKS = 10_000

_CONTAINER_BYTES = 4096
_DATASET_BYTES = 600
_LINK_BYTES = 260
_ENTRY_BYTES = 540
_PART_BYTES = 600
"""What structure costs, measured on containers of 1 to 20,000 datasets and rounded up."""


@dataclass(slots=True)
class PlannedContainer:
    """A container to be: the bodies first put there, the files whose index it carries."""

    name: bytes
    bodies: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    access: Access = field(default_factory=lambda: Access(0o600, None, None))


@dataclass(slots=True)
class PlannedPart:
    """The files and other entries of one run and step; ``links`` are further names of files whose
    first name has another role."""

    run: str
    step: StepLabel | None
    files: list[int] = field(default_factory=list)
    links: list[tuple[int, bytes, Role]] = field(default_factory=list)
    others: list[OtherEntry] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """Everything decided.

    ``container_of`` maps a class of bodies to the container that stores it. ``whole`` maps files
    kept whole to their name in the store. ``index_nbytes`` has the length of each file's index.
    """

    containers: list[PlannedContainer]
    parts: list[PlannedPart]
    container_of: dict[int, int]
    whole: dict[int, bytes]
    index_container: dict[int, int]
    index_nbytes: dict[int, int]
    predicted_nbytes: int
    predicted_inodes: int


def make_plan(tree: Tree, bodies: Bodies, sharing: Sharing, codes: Codes) -> Plan:
    """Lay out the store for what was found to be the same; ``codes`` are tensors' categories."""
    guard = Guard(tree.directories)
    names = Names()
    files = bodies.catalog.files
    containers, container_of = _containers(bodies, sharing, codes, names)
    whole = {
        number: names.take(b"whole/" + file.path)
        for number, file in enumerate(files)
        if not sharing.rewritten[number]
    }
    index_container = {n: c for c, container in enumerate(containers) for n in container.indexes}
    kept = [number for number in whole if files[number].understood]
    if kept:
        for number in kept:
            index_container[number] = len(containers)
        containers.append(PlannedContainer(names.take(b"own/whole-files.h5"), [], kept))
    index_nbytes = {
        number: len(FileIndex(table, Places.none(table.n_payloads)).pack())
        for number in index_container
        for table in [bodies.catalog.table_of(number)]
    }
    _grant(containers, bodies, sharing, guard)
    parts = _parts(tree, bodies)
    nbytes, inodes = _predict(bodies, sharing, containers, whole, index_nbytes, tree, parts)
    return Plan(
        containers, parts, container_of, whole, index_container, index_nbytes, nbytes, inodes
    )


def _containers(
    bodies: Bodies, sharing: Sharing, codes: Codes, names: Names
) -> tuple[list[PlannedContainer], dict[int, int]]:
    sets = _replica_sets(bodies, sharing, codes)
    containers: list[PlannedContainer] = []
    container_of: dict[int, int] = {}

    def put(body: int, container: int) -> None:
        containers[container].bodies.append(body)
        container_of[int(sharing.class_of[body])] = container

    for title, members in sorted(sets.items()):
        filled = MAX_CONTAINER
        for body in sorted(members, key=lambda b: (bodies.file[b], b)):
            nbytes = int(bodies.nbytes[body])
            if filled + nbytes > MAX_CONTAINER:
                containers.append(PlannedContainer(names.take(f"shared/{title}.h5".encode())))
                filled = 0
            put(body, len(containers) - 1)
            filled += nbytes
    stored = first_users(bodies, sharing)
    in_shared = {body for members in sets.values() for body in members}
    own: dict[int, list[int]] = {}
    for body in np.flatnonzero(stored).tolist():
        if body not in in_shared:
            own.setdefault(int(bodies.file[body]), []).append(body)
    for number, file in enumerate(bodies.catalog.files):
        if not (sharing.rewritten[number] and file.understood):
            continue
        name = names.take(b"own/" + file.path + b".h5")
        containers.append(PlannedContainer(name, [], [number]))
        for body in own.get(number, []):
            put(body, len(containers) - 1)
        skeleton = bodies.skeleton(number)
        if not bodies.candidate[skeleton] and bodies.nbytes[skeleton]:
            # Too small to be shared, and no candidate: its class is not looked up by users.
            containers[-1].bodies.append(skeleton)
    return containers, container_of


def _replica_sets(bodies: Bodies, sharing: Sharing, codes: Codes) -> dict[str, list[int]]:
    """Title of each shared container -> the bodies to put there (one for each class)."""
    users = np.flatnonzero(sharing.shared(bodies))
    order = users[np.argsort(sharing.class_of[users], kind="stable")]
    bounds = np.flatnonzero(np.diff(sharing.class_of[order])) + 1
    only = np.zeros(len(bodies), np.bool_)
    only[: bodies.n_payloads] = payloads_of(bodies.catalog.table, codes, OPTIMIZER)
    sets: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for group in np.split(order, bounds) if len(order) else ():
        members = tuple(np.unique(bodies.file[group]).tolist())
        if len(members) > 1 or not bodies.catalog.files[members[0]].understood:
            sets.setdefault((members, bool(only[group].all())), []).append(int(group[0]))
    titled: dict[tuple[str, bool], dict[str, list[int]]] = {}
    for (members, optimizer), found in sets.items():
        roles = [bodies.catalog.files[m].role for m in members]
        scope = titled.setdefault((scope_title(roles), optimizer), {})
        scope.setdefault(ranks_title(roles), []).extend(found)
    joined: dict[str, list[int]] = {}
    for (scope_name, optimizer), scope in titled.items():
        small = [ranks for ranks, found in scope.items() if bodies.nbytes[found].sum() < SMALL_SET]
        for ranks, found in scope.items():
            name = "ranks-mixed" if len(small) > 1 and ranks in small else ranks
            title = ".".join(
                part for part in (scope_name, name, "optimizer" if optimizer else "") if part
            )
            joined.setdefault(title or "common", []).extend(found)
    return joined


def scope_title(roles: Iterable[Role]) -> str:
    """What a container of some files is called by their steps."""
    steps = {(role.run, role.step) for role in roles}
    if len(steps) > 1:
        return "steps"
    step = next(iter(steps))[1]
    return "" if step is None else f"step-{step}"


def ranks_title(roles: Iterable[Role]) -> str:
    """What a container of some files is called by their ranks."""
    ranks = {role.rank for role in roles if role.rank is not None}
    return f"ranks-{compact_ranks(ranks)}" if ranks else ""


def _grant(
    containers: list[PlannedContainer], bodies: Bodies, sharing: Sharing, guard: Guard
) -> None:
    """Every user of a body has a say in who may read the container that stores it."""
    files = bodies.catalog.files
    users: dict[int, set[int]] = {}
    here = np.flatnonzero(sharing.shared(bodies))
    for body in here.tolist():
        users.setdefault(int(sharing.class_of[body]), set()).add(int(bodies.file[body]))
    for container in containers:
        members = set(container.indexes)
        for body in container.bodies:
            members |= users.get(int(sharing.class_of[body]), set()) | {int(bodies.file[body])}
        container.access = guard.strictest(
            (path, files[m].stat) for m in sorted(members) for path in (files[m].path,)
        )


def _parts(tree: Tree, bodies: Bodies) -> list[PlannedPart]:
    found: dict[tuple[str, StepLabel | None], PlannedPart] = {}

    def part(run: str, step: StepLabel | None) -> PlannedPart:
        return found.setdefault((run, step), PlannedPart(run, step))

    part("", None)
    for number, file in enumerate(bodies.catalog.files):
        part(file.role.run, file.role.step).files.append(number)
        for name in file.links:
            role = role_of(name)
            if role.step is None and role.rank is None and not role.coords:
                role.run = file.role.run
            if role != file.role:
                part(role.run, role.step).links.append((number, name, role))
    for path, stat in tree.directories:
        role = role_of(path, directory=True)
        home = part(role.run, role.step) if (role.run, role.step) in found else part("", None)
        home.others.append(OtherEntry(path, stat))
    for link in tree.symlinks:
        role = role_of(link.path)
        home = part(role.run, role.step) if (role.run, role.step) in found else part("", None)
        home.others.append(OtherEntry(link.path, link.stat, link.target))
    return sorted(found.values(), key=lambda p: (p.run, step_key(p.step)))


def _predict(
    bodies: Bodies,
    sharing: Sharing,
    containers: list[PlannedContainer],
    whole: dict[int, bytes],
    index_nbytes: dict[int, int],
    tree: Tree,
    parts: list[PlannedPart],
) -> tuple[int, int]:
    """Bytes and inodes of the store; bytes a little too high rather than too low."""
    total = extras_nbytes() + len(parts) * _PART_BYTES
    total += sum(int(bodies.sizes[number]) for number in whole)
    names = list(whole.values())
    for container in containers:
        names.append(container.name)
        sizes = bodies.nbytes[container.bodies] if container.bodies else np.zeros(0, np.int64)
        large = int((sizes >= LARGE).sum())
        blocks = int(np.where(sizes > BLOCK, -(-sizes // BLOCK) * DIGEST, 0).sum())
        links = 0
        for number in container.indexes:
            if number not in whole:
                links += min(int(bodies.apart[bodies.catalog.payloads(number)].sum()), MAX_LINKS)
        total += (
            _CONTAINER_BYTES
            + int(sizes.sum())
            + len(sizes) * (_DATASET_BYTES + SMALL_ALIGNMENT // 2 + 56)
            + large * PAGE
            + blocks
            + links * _LINK_BYTES
            + sum(index_nbytes[number] + 2 * _DATASET_BYTES for number in container.indexes)
        )
    total += 320 * len(containers)
    table = bodies.catalog.table
    total += sum(len(table.path(row)) + 3 for row in dropped_tensors(bodies, sharing).tolist())
    entries = len(tree.files) + len(tree.directories) + len(tree.symlinks)
    facts = sum(len(str(file.facts)) for file in bodies.catalog.files)
    paths = sum(2 * len(file.path) for file in bodies.catalog.files)
    total += entries * _ENTRY_BYTES + facts + paths
    directories = {os.path.dirname(name) for name in names}
    inodes = len(names) + len(directories) + len(parts) + 8
    return total, inodes
