"""The script in every slim checkpoint that restores it without slimckpt.

The stores here are written by hand after FORMAT.md, with no code of slimckpt: what the script reads
and what slimckpt writes are compared elsewhere.
"""

import ast
import base64
import errno
import importlib.util
import json
import os
import random
import shutil
import signal
import stat
import struct
import subprocess
import sys
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

import blake3
import pytest

SCRIPT = Path(__file__).parents[2] / "slimckpt" / "store" / "restore_script.py"
MIB = 1024 * 1024
BLOCK = 4 * MIB
CONTEXT = "slimckpt block tree"
T = 1_700_000_000_123_456_789


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("way_out", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


way_out = load()


def digest(data: bytes) -> bytes:
    if len(data) <= BLOCK:
        return blake3.blake3(data).digest()
    blocks = [blake3.blake3(data[at : at + BLOCK]).digest() for at in range(0, len(data), BLOCK)]
    tree = struct.pack("<Q", len(data)) + b"".join(blocks)
    return blake3.blake3(tree, derive_key_context=CONTEXT).digest()


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def pack_columns(columns: dict[str, tuple[str, list[int] | bytes]], **header: Any) -> bytes:
    codes = {"<i8": "q", "<u4": "I", "<u2": "H", "|u1": "B"}
    places, body = {}, b""
    for name, (dtype, values) in columns.items():
        places[name] = [len(body), dtype, len(values)]
        body += array(codes[dtype], values).tobytes()
        body += bytes(-len(body) % 8)
    head = json.dumps({**header, "columns": places}).encode()
    head = struct.pack("<8sI", b"SLIMCOL\0", len(head)) + head
    return head + bytes(-len(head) % 8) + body


class Part:
    def __init__(self, run: str, step: int | str | None) -> None:
        self.run, self.step = run, step
        self.containers: list[str] = []
        self.entries: list[dict[str, Any]] = []

    def number(self, container: str) -> int:
        if container not in self.containers:
            self.containers.append(container)
        return self.containers.index(container)


class HandMade:
    """A slim checkpoint and the tree that it must restore to."""

    def __init__(self) -> None:
        self.containers: dict[str, bytes] = {}
        self.whole: dict[str, bytes] = {}
        self.whole_times: dict[str, int] = {}
        self.parts: list[Part] = []
        self.truth: dict[bytes, tuple[Any, ...]] = {}

    def part(self, run: str = "", step: int | str | None = None) -> Part:
        self.parts.append(Part(run, step))
        return self.parts[-1]

    def put(self, container: str, data: bytes) -> int:
        """Store bytes once, after some that belong to nothing."""
        held = self.containers.get(container, b"\x89HDF\r\n")
        if data and data in held:
            return held.index(data)
        self.containers[container] = held + b"structure" + data
        return len(held) + 9

    def stat(self, mode: int, mtime: int) -> dict[str, int]:
        return {"mode": mode, "mtime": mtime, "uid": os.getuid(), "gid": os.getgid()}

    def directory(self, part: Part, path: bytes, mode: int = 0o755, mtime: int = T) -> None:
        part.entries.append({"kind": "directory", "path": text(path), **self.stat(mode, mtime)})
        self.truth[path] = ("directory", mode, mtime)

    def symlink(self, part: Part, path: bytes, target: bytes, mtime: int = T) -> None:
        raw = {"kind": "symlink", "path": text(path), "target": text(target)}
        part.entries.append({**raw, **self.stat(0o777, mtime)})
        self.truth[path] = ("symlink", target, mtime)

    def file(
        self,
        part: Part,
        path: bytes,
        data: bytes,
        payloads: list[tuple[str, list[tuple[int, int]]]] | None = None,
        skeleton: str = "stored",
        *,
        mode: int = 0o644,
        mtime: int = T,
        rank: int | None = None,
        links: tuple[bytes, ...] = (),
        shared: str = "shared/all.h5",
    ) -> dict[str, Any]:
        """``payloads``: a kind of place and spans in ``data`` for each; ``None`` for no index."""
        own = f"own/{len(self.truth)}.h5"
        apart = bytearray(len(data))
        columns = {
            name: [] for name in ("kind", "container", "offset", "nbytes", "span_end", "spans")
        }
        part_end, part_rows, digests = [], [], b""
        for kind, spans in payloads or []:
            body = b"".join(data[at : at + nbytes] for at, nbytes in spans)
            columns["spans"] += spans
            columns["span_end"].append(len(columns["spans"]))
            columns["nbytes"].append(len(body))
            digests += digest(body)
            container = offset = 0
            if kind == "stored":
                container, offset = part.number(shared), self.put(shared, body)
            elif kind == "fill":
                assert set(body) == {body[0]}
                offset = body[0]
            elif kind == "parts":
                offset = len(part_end)
                third = len(body) // 3
                for piece, where in ((body[:third], shared), (body[third:], own)):
                    part_rows.append((part.number(where), self.put(where, piece), len(piece)))
                part_end.append(len(part_rows))
            columns["kind"].append(["skeleton", "stored", "fill", "parts"].index(kind))
            columns["container"].append(container)
            columns["offset"].append(offset)
            if kind != "skeleton":
                for at, nbytes in spans:
                    apart[at : at + nbytes] = b"\1" * nbytes
        rest = data
        if any(apart):
            rest = bytes(byte for byte, gone in zip(data, apart, strict=True) if not gone)
        place: dict[str, Any] = {
            "kind": skeleton,
            "nbytes": len(rest),
            "digest": digest(rest).hex(),
        }
        if skeleton == "stored":
            place.update(container=part.number(own), offset=self.put(own, rest))
        elif skeleton == "fill":
            assert len(set(rest)) <= 1
            place["byte"] = rest[0] if rest else 0
        elif skeleton == "parts":
            half = len(rest) // 2
            place["parts"] = [
                [part.number(where), self.put(where, piece), len(piece)]
                for piece, where in ((rest[:half], own), (rest[half:], shared))
            ]
        elif skeleton == "whole":
            self.whole[f"whole/{text(path)}"] = data
            self.whole_times[f"whole/{text(path)}"] = mtime
            place.update(name=f"whole/{text(path)}", mtime=mtime)
            if len(data) > BLOCK:
                place["blocks"] = base64.b64encode(bytes(64)).decode()
        raw = {
            "kind": "file",
            "path": text(path),
            "nbytes": len(data),
            **self.stat(mode, mtime),
            "origin": "file",
            "format": "safetensors",
            "condition": "understood",
            "problem": None,
            "rank": rank,
            "coords": {},
            "facts": {"a key nobody knows": True},
            "links": [text(link) for link in links],
            "skeleton": place,
        }
        if payloads is not None:
            index = self.index(columns, part_end, part_rows, digests)
            raw["index"] = {
                "container": part.number(own),
                "offset": self.put(own, index),
                "nbytes": len(index),
                "digest": digest(index).hex(),
            }
        part.entries.append(raw)
        for name in (path, *links):
            self.truth[name] = ("file", data, mode, mtime, path if links else None)
        return raw

    def index(
        self, columns: dict[str, list[Any]], part_end: list[int], parts: list[Any], digests: bytes
    ) -> bytes:
        rows = range(len(columns["kind"]))
        names = [f"tensor.{row}".encode() for row in rows]
        ends = [sum(map(len, names[: row + 1])) for row in rows]
        return pack_columns(
            {
                "unknown": ("|u1", b"ignored"),
                "name_end": ("<i8", ends),
                "names": ("|u1", b"".join(names)),
                "home": ("|u1", [1] * len(rows)),
                "home_row": ("<i8", list(rows)),
                "span_end": ("<i8", columns["span_end"]),
                "span_offset": ("<i8", [at for at, _ in columns["spans"]]),
                "span_nbytes": ("<i8", [nbytes for _, nbytes in columns["spans"]]),
                "payload_nbytes": ("<i8", columns["nbytes"]),
                "digest": ("|u1", digests),
                "place_kind": ("|u1", columns["kind"]),
                "place_container": ("<u4", columns["container"]),
                "place_offset": ("<i8", columns["offset"]),
                "part_end": ("<i8", part_end),
                "part_container": ("<u4", [row[0] for row in parts]),
                "part_offset": ("<i8", [row[1] for row in parts]),
                "part_nbytes": ("<i8", [row[2] for row in parts]),
            },
            dtypes=["F32"],
            encodings=["raw"],
            fills=[],
        )

    def write(self, store: Path, **root: Any) -> Path:
        store.mkdir(exist_ok=True)
        for name, data in {**self.containers, **self.whole}.items():
            target = os.path.join(os.fsencode(store), name.encode("utf-8", "surrogateescape"))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            Path(os.fsdecode(target)).write_bytes(data)
            if name in self.whole_times:
                os.utime(target, ns=(self.whole_times[name],) * 2)
        (store / "parts").mkdir(exist_ok=True)
        listed = []
        for number, part in enumerate(self.parts):
            raw = {
                "format": "slimckpt-part",
                "version": 0,
                "requires": [],
                "run": part.run,
                "step": part.step,
                "containers": [
                    {
                        "name": name,
                        "nbytes": len(self.containers.get(name, b"")),
                        "contents": {"offset": 0, "nbytes": 0, "digest": "00" * 32},
                        "structure": "00" * 32,
                    }
                    for name in part.containers
                ],
                "entries": part.entries,
            }
            data = json.dumps(raw).encode()
            name = f"parts/{number:04}.json"
            (store / name).write_bytes(data)
            listed.append(
                {
                    "name": name,
                    "run": part.run,
                    "step": part.step,
                    "nbytes": len(data),
                    "digest": digest(data).hex(),
                }
            )
        seal(store, {"version": 0, "requires": [], "totals": {}, "parts": listed, **root})
        shutil.copy(SCRIPT, store / "restore.py")
        return store


def seal(store: Path, raw: dict[str, Any]) -> None:
    head = {"format": "slimckpt", **{k: v for k, v in raw.items() if k not in ("format", "digest")}}
    data = json.dumps({**head, "digest": "0" * 64}, separators=(",", ":")).encode() + b"\n"
    found = blake3.blake3(data).hexdigest().encode()
    for name in ("slimckpt.json", "slimckpt.json.2"):
        (store / name).write_bytes(data[:-67] + found + data[-3:])


def observed(root: Path) -> dict[bytes, tuple[Any, ...]]:
    """A tree in the terms of :attr:`HandMade.truth`, nothing followed."""
    found: dict[bytes, tuple[Any, ...]] = {}
    top = os.fsencode(root)
    pending, inodes = [b""], {}
    while pending:
        path = pending.pop()
        here = os.path.join(top, path) if path else top
        status = os.lstat(here)
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            found[path] = ("directory", mode, status.st_mtime_ns)
            pending += [os.path.join(path, name) for name in os.listdir(here)]
        elif stat.S_ISLNK(status.st_mode):
            found[path] = ("symlink", os.readlink(here), status.st_mtime_ns)
        else:
            data = Path(os.fsdecode(here)).read_bytes()
            first = min(inodes.setdefault(status.st_ino, path), path)
            inodes[status.st_ino] = first
            found[path] = ("file", data, mode, status.st_mtime_ns, status.st_ino)
    return {
        path: (*entry[:-1], _first(top, path, inodes[entry[-1]])) if entry[0] == "file" else entry
        for path, entry in found.items()
    }


def _first(top: bytes, path: bytes, first: bytes) -> bytes | None:
    return first if os.lstat(os.path.join(top, path)).st_nlink > 1 else None


def run(
    store: Path, *args: Any, python: str = sys.executable, flags: tuple[str, ...] = ("-I", "-S")
):
    command = [python, *flags, str(store / "restore.py"), *map(os.fspath, args)]
    return subprocess.run(command, capture_output=True, text=True, errors="surrogateescape")


def call(store: Path, *args: Any) -> None:
    """The same in this process."""
    options = way_out.parser().parse_args(["--store", str(store), *map(str, args)])
    way_out.restore(options)


ODD = b"step_5/caf\xc3\xa9 \xff\xfe\n.bin"
WEIGHTS = noise(30_000, 1)
STATE = noise(500, 2) + WEIGHTS + bytes(9_000) + noise(7_000, 3) + b"\x07" * 4_000 + noise(77, 4)


def sample() -> HandMade:
    """Two steps, two runs, and one of everything."""
    made = HandMade()
    base = made.part()
    made.directory(base, b"", 0o750, T + 1)
    made.directory(base, b"empty", 0o700, T + 2)
    made.directory(base, b"docs", 0o755, T + 3)
    made.file(base, b"docs/config.json", b'{"a": 1}\n', None, "whole", mode=0o600, mtime=-5)
    made.file(base, b"docs/nothing", b"", None, "fill", mode=0o444)
    made.file(base, b"docs/a", noise(300, 9), None, "stored", links=(b"docs/b", b"step_5/c"))
    made.file(base, b"docs/long", noise(BLOCK + 5, 10), [("skeleton", [(9, 2_000)])], "whole")
    made.symlink(base, b"docs/up", b"../\xff/nowhere", T + 4)
    five = made.part(step=5)
    made.directory(five, b"step_5", 0o555, T + 5)
    made.directory(five, b"step_5/none yet", 0o755, T + 6)
    apart = [
        ("stored", [(500, 20_000), (20_500, 10_000)]),
        ("fill", [(30_500, 9_000)]),
        ("skeleton", [(0, 200)]),
        ("parts", [(39_500, 7_000)]),
        ("fill", [(46_500, 4_000)]),
    ]
    made.file(five, b"step_5/rank_0.st", STATE, apart, "parts", mode=0o4755, rank=0)
    # The same payloads in other places and another order of spans.
    mixed = noise(10, 5) + WEIGHTS[20_000:] + noise(3, 6) + WEIGHTS[:20_000]
    spans = [("stored", [(10_013, 20_000), (10, 10_000)])]
    made.file(five, b"step_5/rank_1.st", mixed, spans, "stored", rank=1)
    made.file(five, ODD, noise(5_000, 7), [("stored", [(0, 5_000)])], "fill")
    made.symlink(five, b"step_5/latest", b"rank_0.st", T + 7)
    other = made.part("other", "2_6")
    made.directory(other, b"other", 0o711, T + 8)
    zeros = b"\0" * 50_000
    made.file(other, b"other/zeros", zeros, [("fill", [(10, 40_000)])], "fill", rank=0)
    return made


EVERYTHING = sample()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return EVERYTHING.write(tmp_path / "store")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def truth_of(*paths: bytes) -> dict[bytes, tuple[Any, ...]]:
    """The paths and all above them."""
    wanted = {b""}
    for path in paths:
        while path:
            wanted.add(path)
            path = os.path.dirname(path)
    return {path: EVERYTHING.truth[path] for path in wanted}


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    status = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


def assert_refused(result: Any, out: Path, code: int, *words: str) -> None:
    """One clear message, and nothing left behind."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    assert not os.path.lexists(out)
    assert not list(out.parent.glob("*.restore-part"))


def altered(tmp_path: Path, change: Any) -> Path:
    made = sample()
    change(made)
    return made.write(tmp_path / "altered")


def entry_of(made: HandMade, path: bytes) -> dict[str, Any]:
    return next(e for p in made.parts for e in p.entries if e["path"] == text(path))


def test_blake3_of_nothing_is_the_official_answer() -> None:
    assert (
        way_out.blake3(b"").hex()
        == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    )


@pytest.mark.parametrize("mode", ["hash", "derive_key"])
def test_blake3_equals_the_package_around_every_block_up_to_5000_bytes(mode: str) -> None:
    data = noise(5_100)
    lengths = {n + d for n in range(0, 5_001, 64) for d in (-1, 0, 1, 30)} - {-1}
    for nbytes in lengths:
        if mode == "hash":
            found, expected = way_out.blake3(data[:nbytes]), blake3.blake3(data[:nbytes])
        else:
            found = way_out.blake3_derive(CONTEXT.encode(), data[:nbytes])
            expected = blake3.blake3(data[:nbytes], derive_key_context=CONTEXT)
        assert found == expected.digest(), nbytes


@pytest.mark.parametrize("nbytes", [MIB - 1, MIB, MIB + 1, 2 * MIB + 1024, 3 * MIB + 77, 5 * MIB])
def test_blake3_equals_the_package_on_long_inputs(nbytes: int) -> None:
    data = noise(nbytes)
    assert way_out.blake3(data) == blake3.blake3(data).digest()
    derived = blake3.blake3(data, derive_key_context="another context").digest()
    assert way_out.blake3_derive(b"another context", data) == derived


def test_blake3_bears_the_carries_of_words_that_are_all_ones() -> None:
    data = b"\xff" * 200_000
    assert way_out.blake3(data) == blake3.blake3(data).digest()


@pytest.mark.parametrize("nbytes", [0, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 9])
def test_a_digest_does_not_depend_on_how_the_bytes_arrive(nbytes: int) -> None:
    data = noise(nbytes)
    pieces = [data[at : at + 1_500_000] for at in range(0, nbytes, 1_500_000)]
    assert way_out.digest_of(pieces) == digest(data)


def test_columns_are_little_endian_on_every_host(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack_columns({"a": ("<i8", [1, -2, 1 << 40]), "b": ("<u4", [7]), "c": ("|u1", b"xyz")})
    for host in (sys.byteorder, {"little": "big", "big": "little"}[sys.byteorder]):
        foreign = host != sys.byteorder
        monkeypatch.setattr(sys, "byteorder", host)
        for name, code, values in (("a", "q", [1, -2, 1 << 40]), ("b", "I", [7])):
            expected = array(code, values)
            if foreign:
                # This host still reads as it did, so a foreign one's swap shows.
                expected.byteswap()
            assert way_out.Columns(data)[name] == expected
        assert way_out.Columns(data)["c"].tobytes() == b"xyz"


def test_the_script_parses_as_python_3_8_and_needs_the_standard_library_alone() -> None:
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 8))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").partition(".")[0])
    newer = {"zoneinfo", "graphlib", "tomllib", "_colorize"}
    assert imported <= set(sys.stdlib_module_names) - newer


def test_the_script_calls_nothing_that_came_after_python_3_8() -> None:
    tree = ast.parse(SCRIPT.read_text())
    first = next(node for node in tree.body if not isinstance(node, ast.Expr))
    # With it no annotation is evaluated, so list[int] and X | None may stand there.
    assert isinstance(first, ast.ImportFrom) and first.module == "__future__"
    assert [alias.name for alias in first.names] == ["annotations"]
    newer = {
        "removeprefix", "removesuffix", "bit_count", "is_relative_to", "cache", "lcm", "nextafter",
        "pairwise", "batched", "unparse", "to_thread", "EllipsisType", "UnionType", "file_digest",
        "splice", "eventfd", "waitstatus_to_exitcode", "chdir", "aclosing",
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert node.attr not in newer
        if isinstance(node, ast.Call):
            named = {keyword.arg for keyword in node.keywords}
            assert not named & {"strict", "slots", "kw_only", "onexc"}
    annotations = {id(n) for a in _annotations(tree) for n in ast.walk(a)}
    builtin = {"list", "dict", "set", "tuple", "type", "frozenset", "array", "Callable", "Iterator"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            assert node.value.id not in builtin or id(node) in annotations, ast.dump(node)


def _annotations(tree: ast.AST) -> list[ast.expr]:
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
    return [annotation for annotation in found if annotation is not None]


def test_everything_is_restored(store: Path, out: Path) -> None:
    result = run(store, out)
    assert (result.returncode, result.stderr) == (0, "")
    assert observed(out) == EVERYTHING.truth
    assert "NOT checked" in result.stdout.splitlines()[-1]


def test_everything_is_restored_and_checked(store: Path, out: Path) -> None:
    result = run(store, out, "--check")
    assert result.returncode == 0
    assert observed(out) == EVERYTHING.truth
    assert "were checked" in result.stdout.splitlines()[-1]
    assert "slow" in result.stderr and "estimate" in result.stderr


def test_python_3_8_restores_everything(store: Path, out: Path) -> None:
    python = shutil.which("python3.8")
    if python is None or subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip("no Python 3.8 here; the script is parsed as 3.8 in another test")
    result = run(store, out, "--check", python=python)
    assert result.returncode == 0, result.stderr
    assert observed(out) == EVERYTHING.truth


def test_no_module_that_lies_in_the_store_is_imported(store: Path, out: Path) -> None:
    for name in ("json", "argparse", "struct", "typing", "contextlib", "blake3", "signal"):
        (store / f"{name}.py").write_text("raise SystemExit('hijacked')")
    result = run(store, out, flags=())
    assert (result.returncode, result.stderr) == (0, "")
    assert observed(out) == EVERYTHING.truth


def test_a_store_elsewhere_can_be_named(store: Path, out: Path) -> None:
    moved = out.parent / "script"
    moved.mkdir()
    shutil.copy(SCRIPT, moved / "restore.py")
    assert run(moved, out).returncode == 2
    assert run(moved, out, "--store", store).returncode == 0
    assert observed(out) == EVERYTHING.truth


STEP_5 = (b"step_5/rank_0.st", b"step_5/rank_1.st", b"step_5/latest", b"step_5/none yet", ODD)
NO_STEP = (b"docs/config.json", b"docs/nothing", b"docs/a", b"docs/b", b"docs/long", b"docs/up")
NO_STEP += (b"step_5/c", b"empty")
SELECTIONS = {
    "a step": (["--step", "5"], (*STEP_5, *NO_STEP)),
    "a step with a name": (["--step", "2_6"], (b"other/zeros", *NO_STEP)),
    "two steps": (["--step", "5", "--step", "2_6"], (*STEP_5, b"other/zeros", *NO_STEP)),
    "a rank": (["--rank", "1"], (*set(STEP_5) - {b"step_5/rank_0.st"}, *NO_STEP)),
    "a run": (["--run", "other"], (b"other/zeros", *NO_STEP)),
    "a rank of a step": (
        ["--step", "5", "--rank", "1"],
        (*set(STEP_5) - {b"step_5/rank_0.st"}, *NO_STEP),
    ),
    "a glob": (["--file", "*rank_?.st"], (b"step_5/rank_0.st", b"step_5/rank_1.st")),
    "two globs": (["--file", "*zeros", "--file", "docs/no*"], (b"other/zeros", b"docs/nothing")),
    "a glob in a step": (["--step", "5", "--file", "*_0*"], (b"step_5/rank_0.st",)),
    "an empty directory": (["--file", "step_5/none*"], (b"step_5/none yet",)),
    "a symbolic link": (["--file", "*/latest"], (b"step_5/latest",)),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_restores_what_it_names_and_the_directories_above(
    name: str, store: Path, out: Path
) -> None:
    args, paths = SELECTIONS[name]
    result = run(store, out, *args)
    assert result.returncode == 0, result.stderr
    assert observed(out) == truth_of(*paths)


def test_a_glob_that_is_not_utf8_matches_bytes(store: Path, out: Path) -> None:
    assert run(store, out, "--file", b"*\xff\xfe*").returncode == 0
    assert observed(out) == truth_of(ODD)


def test_a_link_selected_alone_is_a_file_of_its_own(store: Path, out: Path) -> None:
    assert run(store, out, "--file", "docs/b").returncode == 0
    found = observed(out)
    assert found[b"docs/b"] == (*EVERYTHING.truth[b"docs/b"][:-1], None)
    assert b"docs/a" not in found


def test_links_selected_without_the_first_path_are_linked_to_each_other(
    store: Path, out: Path
) -> None:
    assert run(store, out, "--file", "docs/b", "--file", "*/c").returncode == 0
    found = observed(out)
    for name in (b"docs/b", b"step_5/c"):
        assert found[name] == (*EVERYTHING.truth[name][:-1], b"docs/b")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--step", "7"], "5, 2_6"),
        (["--rank", "9"], "0, 1"),
        (["--run", "nope"], "'other'"),
        (["--file", "nope*"], "nope*"),
        (["--file", "docs"], "'*' also matches '/'"),
        (["--step", "2_6", "--rank", "1"], "no rank 1"),
        (["--step", "5", "--file", "other/*"], "matches nothing"),
    ],
)
def test_a_selection_of_nothing_is_an_error_that_says_what_there_is(
    args: list[str], word: str, store: Path, out: Path
) -> None:
    assert_refused(run(store, out, *args), out, 2, word)


def test_a_damaged_part_does_not_stop_a_selection_without_it(store: Path, out: Path) -> None:
    flip(store / "parts/0002.json", 100)
    assert_refused(run(store, out), out, 1, "0002.json", "expected digest")
    result = run(store, out, "--step", "5")
    assert result.returncode == 0 and "0002.json" in result.stderr
    assert observed(out) == truth_of(*STEP_5, *NO_STEP)


def test_synthetic_entries_are_refused_by_name(tmp_path: Path, out: Path) -> None:
    def change(made: HandMade) -> None:
        entry_of(made, b"other/zeros")["origin"] = "synthetic"

    changed = altered(tmp_path, change)
    refused = ("other/zeros", "no original file", "slimckpt export", "Nothing was restored")
    assert_refused(run(changed, out), out, 2, *refused)
    assert_refused(run(changed, out, "--file", "other/*"), out, 2, *refused)
    assert run(changed, out, "--file", "step_5/*").returncode == 0
    assert b"step_5/rank_0.st" in observed(out) and b"other/zeros" not in observed(out)


def test_a_damaged_or_missing_root_manifest_is_read_from_its_copy(store: Path, out: Path) -> None:
    flip(store / "slimckpt.json", 50)
    result = run(store, out)
    assert result.returncode == 0 and "slimckpt.json: expected digest" in result.stderr
    assert observed(out) == EVERYTHING.truth
    (store / "slimckpt.json").unlink()
    assert run(store, out.with_name("again")).returncode == 0
    flip(store / "slimckpt.json.2", 60)
    assert_refused(run(store, out.with_name("third")), out.with_name("third"), 1, "is missing")


def test_a_directory_without_manifest_is_no_slim_checkpoint(store: Path, out: Path) -> None:
    for name in ("slimckpt.json", "slimckpt.json.2"):
        (store / name).unlink()
    assert_refused(run(store, out), out, 2, "not a slim checkpoint")


def test_a_flipped_bit_in_an_index_is_found_without_a_check(store: Path, out: Path) -> None:
    index = entry_of(EVERYTHING, b"step_5/rank_0.st")["index"]
    name = EVERYTHING.parts[1].containers[index["container"]]
    flip(store / name, index["offset"] + index["nbytes"] - 3, 4)
    assert_refused(run(store, out), out, 1, name, "step_5/rank_0.st", "expected digest", "found")


@pytest.mark.parametrize(
    ("path", "needle", "words"),
    [
        ("shared/all.h5", WEIGHTS[:50], ("step_5/rank_0.st", "tensor tensor.0", "shared/all.h5")),
        ("shared/all.h5", STATE[39_500:39_550], ("step_5/rank_0.st", "tensor tensor.3")),
        ("shared/all.h5", STATE[-50:], ("step_5/rank_0.st", "skeleton")),
        ("whole/docs/config.json", b"a", ("docs/config.json", "content")),
        ("whole/docs/long", noise(BLOCK + 5, 10)[:50], ("docs/long", "content")),
    ],
    ids=["stored", "parts", "skeleton", "whole", "long"],
)
def test_flipped_bits_in_contents_are_found_by_a_check_alone(
    path: str, needle: bytes, words: tuple[str, ...], store: Path, out: Path
) -> None:
    flip(store / path, (store / path).read_bytes().index(needle), 7)
    assert_refused(run(store, out, "--check"), out, 1, *words, "expected digest", "found")
    result = run(store, out)
    assert result.returncode == 0
    assert "NOT checked" in result.stdout.splitlines()[-1]


def test_after_any_flipped_bit_a_checked_restore_is_right_or_refused(
    store: Path, tmp_path: Path
) -> None:
    chance = random.Random(1)
    # What is not restored is checked by other means; a long file only takes time.
    skipped = ("restore.py", "long")
    files = sorted(p for p in store.rglob("*") if p.is_file() and p.name not in skipped)
    selection = ["--file", "step_5/*", "--file", "other/*", "--file", "docs/[!l]*"]
    refused = 0
    for number in range(80):
        path = chance.choice(files)
        data, status = path.read_bytes(), path.stat()
        flip(path, chance.randrange(len(data)), chance.randrange(8))
        out = tmp_path / f"out {number}"
        try:
            call(store, out, "--check", *selection)
        except way_out.Damage:
            refused += 1
            assert not out.exists()
        else:
            wanted = [p for p in EVERYTHING.truth if p not in (b"docs/long", b"empty")]
            assert observed(out) == truth_of(*wanted)
        path.write_bytes(data)
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert 10 < refused < 80


def test_a_container_of_another_size_or_missing_is_damage(store: Path, out: Path) -> None:
    shared = store / "shared/all.h5"
    data = shared.read_bytes()
    shared.write_bytes(data[:-1])
    assert_refused(run(store, out), out, 1, "all.h5", f"expected {len(data)}", f"{len(data) - 1}")
    shared.unlink()
    assert_refused(run(store, out), out, 1, "all.h5 is missing")
    os.mkfifo(shared)
    assert_refused(run(store, out), out, 1, "all.h5 is not a regular file")
    assert run(store, out, "--file", "docs/*").returncode == 0


def test_a_container_cut_behind_the_index_that_alone_is_used_is_no_damage(
    tmp_path: Path, out: Path
) -> None:
    """As for ``slimckpt restore``: digests prove the index, sizes stand for contents."""
    made = sample()
    index = entry_of(made, ODD)["index"]
    (part,) = (part for part in made.parts if part.step == 5)
    name = part.containers[index["container"]]
    made.put(name, b"what nobody needs")
    store = made.write(tmp_path / "store")
    end = index["offset"] + index["nbytes"]
    os.truncate(store / name, end)
    for check in ((), ("--check",)):
        assert run(store, out, *check).returncode == 0
        assert observed(out) == EVERYTHING.truth
        shutil.rmtree(out)
    os.truncate(store / name, end - 1)
    assert_refused(run(store, out), out, 1, name)


def test_a_whole_file_of_another_size_is_damage_and_of_another_time_is_said(
    store: Path, out: Path
) -> None:
    whole = store / "whole/docs/config.json"
    whole.touch()
    result = run(store, out)
    assert result.returncode == 0 and "another modification time" in result.stderr
    assert observed(out) == EVERYTHING.truth
    whole.write_bytes(b"{}")
    again = out.with_name("again")
    assert_refused(run(store, again), again, 1, "config.json", "expected 9 bytes, found 2")


@pytest.mark.parametrize("root", [{"version": 1}, {"requires": ["delta"]}, {"version": "0"}])
def test_a_later_format_is_refused(root: dict[str, Any], tmp_path: Path, out: Path) -> None:
    store = EVERYTHING.write(tmp_path / "later", **root)
    word = "delta" if "requires" in root else repr(root["version"])
    assert_refused(run(store, out), out, 2, word, "knows version 0")


@pytest.mark.parametrize(
    "path", ["/etc/x", "../x", "a/../../x", "a//b", "./a", "a/.", "a/", "a\0b", "\ud800", "", 7]
)
@pytest.mark.parametrize("where", ["file", "link", "directory", "symlink", "whole", "container"])
def test_a_path_that_could_leave_its_directory_is_refused(
    path: Any, where: str, tmp_path: Path
) -> None:
    if (where, path) == ("directory", ""):
        pytest.skip("the empty path is the root of the tree")

    def change(made: HandMade) -> None:
        if where == "file":
            entry_of(made, b"docs/nothing")["path"] = path
        elif where == "link":
            entry_of(made, b"docs/a")["links"][0] = path
        elif where == "directory":
            entry_of(made, b"docs")["path"] = path
        elif where == "symlink":
            entry_of(made, b"docs/up")["path"] = path
        elif where == "whole":
            entry_of(made, b"docs/config.json")["skeleton"]["name"] = path

    store = altered(tmp_path, change)
    if where == "container":
        raw = json.loads((store / "parts/0001.json").read_text())
        raw["containers"][0]["name"] = path
        replace_part(store, 1, raw)
    with pytest.raises(way_out.Damage):
        call(store, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["altered"]


def replace_part(store: Path, number: int, raw: dict[str, Any]) -> None:
    data = json.dumps(raw).encode()
    (store / f"parts/{number:04}.json").write_bytes(data)
    root = json.loads((store / "slimckpt.json").read_bytes())
    root["parts"][number].update(nbytes=len(data), digest=digest(data).hex())
    seal(store, root)


def test_nothing_is_written_through_a_symbolic_link_of_the_store(tmp_path: Path, out: Path) -> None:
    def change(made: HandMade) -> None:
        made.symlink(made.parts[0], b"trap", os.fsencode(tmp_path))
        made.file(made.parts[0], b"trap/escaped", b"x")

    assert_refused(run(altered(tmp_path, change), out), out, 1, "trap")
    assert not (tmp_path / "escaped").exists()


def test_a_path_that_is_listed_twice_is_refused(tmp_path: Path, out: Path) -> None:
    def change(made: HandMade) -> None:
        made.file(made.parts[2], b"docs/b", b"x")

    assert_refused(run(altered(tmp_path, change), out), out, 1, "docs/b is listed twice")


def test_files_stored_in_an_unknown_way_are_listed_and_the_rest_can_be_selected(
    tmp_path: Path, out: Path
) -> None:
    def change(made: HandMade) -> None:
        entry_of(made, b"docs/a")["skeleton"]["kind"] = "delta"
        columns = {
            "kind": [9],
            "container": [0],
            "offset": [0],
            "nbytes": [5],
            "span_end": [1],
            "spans": [(0, 5)],
        }
        index = made.index(columns, [], [], bytes(32))
        part = made.parts[2]
        entry_of(made, b"other/zeros")["index"] = {
            "container": part.number("own/late.h5"),
            "offset": made.put("own/late.h5", index),
            "nbytes": len(index),
            "digest": digest(index).hex(),
        }

    store = altered(tmp_path, change)
    assert_refused(run(store, out), out, 1, "docs/a (kind 'delta')", "other/zeros (kind 9)")
    assert run(store, out, "--file", "step_5/*.st").returncode == 0


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("span_offset", [0, 10]),
        ("span_offset", [-5, 10]),
        ("span_offset", [30_005, 10]),
        ("span_nbytes", [20_000, 9_999]),
        ("span_end", [3]),
        ("span_end", [-1]),
        ("payload_nbytes", [30_001]),
        ("place_kind", [3]),
        ("place_container", [17]),
        ("place_offset", [-1]),
        ("place_offset", [1 << 40]),
        ("digest", [0] * 31),
        ("place_offset", []),
    ],
)
def test_an_index_that_lies_is_damage_and_not_wrong_bytes(
    column: str, values: list[int], tmp_path: Path, out: Path
) -> None:
    made = sample()
    part = made.parts[1]
    entry = entry_of(made, b"step_5/rank_1.st")
    right: dict[str, tuple[str, Any]] = {
        "span_end": ("<i8", [2]),
        "span_offset": ("<i8", [10_013, 10]),
        "span_nbytes": ("<i8", [20_000, 10_000]),
        "payload_nbytes": ("<i8", [30_000]),
        "digest": ("|u1", digest(WEIGHTS)),
        "place_kind": ("|u1", [1]),
        "place_container": ("<u4", [part.number("shared/all.h5")]),
        "place_offset": ("<i8", [made.put("shared/all.h5", WEIGHTS)]),
        "part_end": ("<i8", []),
        "part_container": ("<u4", []),
        "part_offset": ("<i8", []),
        "part_nbytes": ("<i8", []),
    }

    def use(columns: dict[str, Any], store: Path) -> Path:
        index = pack_columns(columns)
        name = "own/lies.h5"
        made.containers[name] = index
        number = part.number(name)
        entry["index"] = {
            "container": number,
            "offset": 0,
            "nbytes": len(index),
            "digest": digest(index).hex(),
        }
        return made.write(store)

    honest = use(right, tmp_path / "honest")
    call(honest, tmp_path / "right", "--file", "*rank_1.st")
    assert observed(tmp_path / "right") == truth_of(b"step_5/rank_1.st")
    lying = use({**right, column: (right[column][0], values)}, tmp_path / "lying")
    assert_refused(run(lying, out), out, 1, "step_5/rank_1.st")


def test_an_out_that_exists_is_refused_and_kept(store: Path, out: Path) -> None:
    out.mkdir()
    result = run(store, out)
    assert result.returncode == 2 and "exists" in result.stderr
    assert list(out.iterdir()) == []
    out.rmdir()
    out.symlink_to("nowhere")
    assert run(store, out).returncode == 2
    assert out.is_symlink()


def test_an_out_inside_the_store_or_around_it_is_refused(store: Path, tmp_path: Path) -> None:
    before = sorted(store.rglob("*"))
    link = tmp_path / "link"
    link.symlink_to(store)
    for out in (store / "out", link / "own" / "out", store):
        result = run(store, out)
        assert result.returncode == 2 and "lies inside" in result.stderr
    assert run(store, tmp_path).returncode == 2
    assert sorted(store.rglob("*")) == before


def test_an_out_without_a_directory_above_it_is_refused(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "no" / "out"
    result = run(store, out)
    assert result.returncode == 2 and "make it first" in result.stderr
    assert not out.parent.exists()


def test_a_work_directory_that_is_in_the_way_is_refused_and_kept(store: Path, out: Path) -> None:
    work = out.with_name("out.restore-part")
    work.mkdir()
    (work / "mine").touch()
    result = run(store, out)
    assert result.returncode == 2 and "in the way" in result.stderr
    assert (work / "mine").exists() and not out.exists()


@pytest.mark.parametrize(
    ("stop", "word"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (OSError(errno.EIO, "Input/output error"), "Input/output"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
@pytest.mark.parametrize("after", [0, 9, 14])
def test_a_full_disk_or_a_signal_leaves_nothing(
    stop: BaseException,
    word: str,
    after: int,
    store: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = []

    def fail(fd: int) -> None:
        done.append(fd)
        if len(done) > after:
            raise stop

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(sys, "argv", ["restore.py", str(out), "--store", str(store)])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert way_out.main() == 2
    assert word in capsys.readouterr().err
    assert [p.name for p in out.parent.iterdir()] == ["store"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, errno.EINVAL, None])
def test_a_kernel_that_does_not_copy_makes_no_difference(
    number: int | None, store: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        if number is None:
            return 0
        raise OSError(number, "no")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    call(store, out)
    assert observed(out) == EVERYTHING.truth


def test_where_links_cannot_be_made_there_are_copies(
    store: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    call(store, out)
    assert "2 hard links" in capsys.readouterr().err
    alone = {p: (*e[:-1], None) if e[0] == "file" else e for p, e in EVERYTHING.truth.items()}
    assert observed(out) == alone


def test_an_owner_that_may_not_be_set_is_no_error(
    store: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(os, "chown", refuse)
    call(store, out)
    assert observed(out) == EVERYTHING.truth


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")
def test_root_gives_back_owners_and_setuid_with_them(tmp_path: Path, out: Path) -> None:
    def change(made: HandMade) -> None:
        for path in (b"step_5/rank_0.st", b"docs/up", b"step_5"):
            entry_of(made, path).update(uid=12345, gid=54321)

    assert run(altered(tmp_path, change), out).returncode == 0
    for path in ("step_5/rank_0.st", "docs/up", "step_5"):
        status = (out / path).lstat()
        assert (status.st_uid, status.st_gid) == (12345, 54321)
    assert stat.S_IMODE((out / "step_5/rank_0.st").stat().st_mode) == 0o4755


def test_fills_of_zeros_are_holes(store: Path, out: Path) -> None:
    call(store, out, "--file", "other/zeros")
    status = (out / "other/zeros").stat()
    assert (status.st_size, status.st_blocks) == (50_000, 0)


def test_more_containers_than_may_be_open_are_read(tmp_path: Path, out: Path) -> None:
    made = HandMade()
    part = made.part()
    made.directory(part, b"")
    for number in range(way_out.MOST_OPEN + 9):
        data = noise(2_000, number)
        made.file(part, f"f{number}".encode(), data, [("parts", [(5, 1_500)])])
    assert run(made.write(tmp_path / "many"), out, "--check").returncode == 0
    assert observed(out) == made.truth
