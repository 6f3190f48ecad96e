"""Walking a source tree: everything in it, in byte order, nothing followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slimckpt.errors import UnfaithfulSourceError, UsageError
from slimckpt.model import ROOT_COPY, ROOT_MANIFEST, STORE_MARK, Stat, show_path

Signature = tuple[int, ...]
"""What changes when an entry changes: inode, size, mtime, ctime."""


@dataclass(slots=True)
class TreeFile:
    """A body: one inode, under its first path in byte order. ``links`` are its further paths."""

    path: bytes
    size: int
    stat: Stat
    links: tuple[bytes, ...] = ()
    in_store: bool = False
    outside_links: int = 0


@dataclass(slots=True)
class TreeLink:
    """A symbolic link and what it points to."""

    path: bytes
    target: bytes
    stat: Stat


@dataclass(slots=True)
class Tree:
    """Everything below ``root`` (``directories`` includes the root itself, as the empty path).

    ``xattrs`` are the paths that carry extended attributes or ACLs, which are not kept. ``roots``
    are those of a joined tree, each with the number of its files.
    """

    root: bytes
    files: list[TreeFile] = field(default_factory=list)
    directories: list[tuple[bytes, Stat]] = field(default_factory=list)
    symlinks: list[TreeLink] = field(default_factory=list)
    stores: list[bytes] = field(default_factory=list)
    xattrs: list[bytes] = field(default_factory=list)
    signatures: dict[bytes, Signature] = field(default_factory=dict)
    roots: list[tuple[bytes, int]] = field(default_factory=list)

    def absolute(self, path: bytes) -> bytes:
        return os.path.join(self.root, path) if path else self.root


def walk(root: bytes, *, to_copy: bool = True) -> Tree:
    """Take stock of a tree.

    Parameters
    ----------
    root : bytes
        A directory, or a symbolic link to one.
    to_copy : bool
        Whether everything in it is to be copied. If not, devices, FIFOs and sockets are passed
        over.

    Raises
    ------
    UsageError
        ``root`` is not a directory.
    UnfaithfulSourceError
        Something in it cannot be copied faithfully: a device, a FIFO, a socket, a directory that
        cannot be read, a path that is too long.
    """
    if not root:
        raise UsageError("the name of the directory is empty; is a variable not set?")
    root = os.path.realpath(root)
    try:
        is_directory = stat.S_ISDIR(os.stat(root).st_mode)
    except OSError as error:
        raise UsageError(f"{show_path(root)}: {error.strerror}; name a directory") from None
    if not is_directory:
        raise UsageError(f"{show_path(root)} is not a directory; name the directory that holds it")
    tree = Tree(root)
    inodes: dict[tuple[int, int], TreeFile] = {}
    names: dict[tuple[int, int], int] = {}
    for path, found, in_store in _entries(tree):
        here = tree.absolute(path)
        tree.signatures[path] = _signature(found)
        kept = Stat(stat.S_IMODE(found.st_mode), found.st_mtime_ns, found.st_uid, found.st_gid)
        if stat.S_ISDIR(found.st_mode):
            tree.directories.append((path, kept))
        elif stat.S_ISLNK(found.st_mode):
            tree.symlinks.append(TreeLink(path, _target(here, path), kept))
            continue
        elif stat.S_ISREG(found.st_mode):
            inode = (found.st_dev, found.st_ino)
            if found.st_nlink > 1:
                names[inode] = names.get(inode, 0) + 1
            if inode in inodes and found.st_nlink > 1:
                inodes[inode].links += (path,)
                inodes[inode].outside_links -= 1
                continue
            inodes[inode] = TreeFile(path, found.st_size, kept, (), in_store, found.st_nlink - 1)
            tree.files.append(inodes[inode])
        elif not to_copy:
            continue
        else:
            kind = stat.filemode(found.st_mode)[0]
            what = {"p": "a FIFO", "s": "a socket"}.get(kind, "a device")
            raise UnfaithfulSourceError(
                f"{show_path(path)} is {what} and cannot be copied; remove it and run again"
            )
        if _has_xattrs(here):
            tree.xattrs.append(path)
    return tree


def join(trees: Sequence[Tree], names: Sequence[bytes]) -> Tree:
    """Several trees as one, for looking at: its root is the working directory, and the paths of
    each tree start with the name it was given by.

    Raises
    ------
    UsageError
        A tree is given twice, or lies inside another.
    """
    for one, name in zip(trees, names, strict=True):
        for other, inner in zip(trees, names, strict=True):
            if one is not other and (other.root + b"/").startswith(one.root.rstrip(b"/") + b"/"):
                where = "the same directory as" if one.root == other.root else "inside"
                raise UsageError(
                    f"{show_path(inner)} is {where} {show_path(name)}; name each directory once"
                )
    joined = Tree(b"")
    known: dict[Signature, TreeFile] = {}
    for tree, name in zip(trees, names, strict=True):
        before = len(joined.files)
        for file in tree.files:
            paths = [os.path.join(name, path) for path in (file.path, *file.links)]
            signature = tree.signatures[file.path]
            if file.outside_links and signature in known:
                # One inode, by its number and the moment it last changed, seen from two trees.
                known[signature].links += tuple(paths)
                known[signature].outside_links -= len(paths)
                continue
            known[signature] = replace(file, path=paths[0], links=tuple(paths[1:]))
            joined.files.append(known[signature])
        joined.xattrs += [os.path.join(name, path) for path in tree.xattrs]
        joined.roots.append((name, len(joined.files) - before))
    return joined


def changed_since(tree: Tree) -> list[bytes]:
    """Paths that appeared, went or changed since ``tree`` was walked."""
    now = walk(tree.root).signatures
    before = tree.signatures
    return sorted(p for p in before.keys() | now.keys() if before.get(p) != now.get(p))


def _entries(tree: Tree) -> list[tuple[bytes, os.stat_result, bool]]:
    """All entries in byte order of their paths, with whether they are inside a store."""
    found = [(b"", os.stat(tree.root), False)]
    pending: list[tuple[bytes, bool]] = [(b"", False)]
    while pending:
        directory, in_store = pending.pop()
        try:
            with os.scandir(tree.absolute(directory)) as listing:
                entries = list(listing)
            if directory and not in_store and is_store(tree.absolute(directory)):
                in_store = True
                tree.stores.append(directory)
            for entry in entries:
                path = os.path.join(directory, entry.name) if directory else entry.name
                status = entry.stat(follow_symlinks=False)
                found.append((path, status, in_store))
                if stat.S_ISDIR(status.st_mode):
                    pending.append((path, in_store))
        except OSError as error:
            raise UnfaithfulSourceError(
                f"{show_path(directory) or '.'}: {error.strerror}; slimckpt must be able to read"
                " all of the tree"
            ) from None
    return sorted(found, key=lambda entry: entry[0])


def is_store(directory: bytes) -> bool:
    """Whether a directory is a slim checkpoint, by either copy of its root manifest."""
    for name in (ROOT_MANIFEST, ROOT_COPY):
        try:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if os.pread(fd, len(STORE_MARK), 0) == STORE_MARK:
                return True
        except OSError:
            continue
        finally:
            os.close(fd)
    return False


def _target(here: bytes, path: bytes) -> bytes:
    try:
        return os.readlink(here)
    except OSError as error:
        raise UnfaithfulSourceError(
            f"{show_path(path)}: {error.strerror}; it changed while it was read"
        ) from None


def _signature(found: os.stat_result) -> Signature:
    size = found.st_size if stat.S_ISREG(found.st_mode) else 0
    return (found.st_ino, found.st_mode, size, found.st_mtime_ns, found.st_ctime_ns)


def _has_xattrs(path: bytes) -> bool:
    try:
        return bool(os.listxattr(path, follow_symlinks=False))
    except OSError:
        return False
