"""The house: arrows point down only, every write is in one place, nothing in an input runs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "slimckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))
FLOORS = (
    ("__main__",),
    ("cli",),
    ("convert", "frameworks", "mount"),
    ("views",),
    ("layouts",),
    ("doctor",),
    ("rewrite",),
    ("store",),
    ("analysis",),
    ("formats",),
    ("effects",),
    ("sources",),
    ("encodings", "dtypes", "columns", "progress", "signals"),
    ("model",),
    ("errors",),
)
"""From the roof down. What is on a floor may import what is on its own and on lower ones."""
LEVEL = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ROOF = ("slimckpt",)
"""The package itself re-exports what is public, and nothing but the command may lean on it."""
FRAMEWORKS = ("torch", "mindspore", "paddle", "safetensors")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names imported anywhere in a module, inside functions too, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Calls by dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def room_of(dotted: str) -> str | None:
    parts = dotted.split(".")
    return parts[1] if parts[0] == "slimckpt" and len(parts) > 1 else None


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down_the_house(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if parts == ("__init__",):
        return
    own = parts[0]
    assert own in LEVEL, f"{own} has no floor"
    for dotted, line in imports(tree_of(path)):
        if dotted.split(".")[0] != "slimckpt":
            continue
        room = room_of(dotted)
        if room not in LEVEL:
            assert own in ("cli", "__main__"), f"{path}:{line} leans on the roof: {dotted}"
        else:
            assert LEVEL[room] >= LEVEL[own], f"{path}:{line} imports upward: {dotted}"


FORBIDDEN = (
    *("os.mkdir", "os.makedirs", "os.rename", "os.renames", "os.replace", "os.unlink", "os.remove"),
    *("os.rmdir", "os.removedirs", "os.link", "os.symlink", "os.mkfifo", "os.mknod", "os.truncate"),
    *("os.ftruncate", "os.write", "os.pwrite", "os.pwritev", "os.writev", "os.sendfile"),
    *("os.copy_file_range", "os.chmod", "os.fchmod", "os.lchmod", "os.chown", "os.fchown"),
    *("os.lchown", "os.utime", "os.fsync", "os.fdatasync", "os.setxattr", "os.removexattr"),
    *("os.posix_fallocate", "os.fdopen", "io.open", "open_code", "h5py.File"),
)
MODULES_THAT_WRITE = ("shutil", "tempfile")
METHODS = (
    *("write_bytes", "write_text", "mkdir", "touch", "unlink", "rmdir", "symlink_to"),
    *("hardlink_to", "chmod", "lchmod", "tofile"),
)
MAY_WRITE = ("effects.py", "store/restore_script.py")
"""The way out is a program of its own, for people who have no slimckpt."""


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_write_goes_through_effects(path: Path) -> None:
    if name_of(path) in MAY_WRITE:
        return
    tree = tree_of(path)
    for dotted, line in imports(tree):
        assert dotted.split(".")[0] not in MODULES_THAT_WRITE, f"{path}:{line} imports {dotted}"
        assert dotted not in FORBIDDEN, f"{path}:{line} imports {dotted}"
    for name, call in calls(tree):
        where = f"{path}:{call.lineno}: {name}"
        assert name not in FORBIDDEN, where
        assert name.startswith("effects.") or name.rsplit(".", 1)[-1] not in METHODS, where
        if name == "open" or (name.endswith(".open") and name.startswith("Path(")):
            mode = call.args[1] if len(call.args) > 1 else None
            mode = next((k.value for k in call.keywords if k.arg == "mode"), mode)
            text = mode.value if isinstance(mode, ast.Constant) else "r" if mode is None else "?"
            assert not set(str(text)) & set("wax+?"), where
        if name == "os.open":
            flags = " ".join(map(ast.unparse, call.args[1:]))
            assert "O_CREAT" not in flags and "O_TRUNC" not in flags, where
            if "O_RDWR" in flags or "O_WRONLY" in flags:
                # Opening what effects made, to hand the descriptor back to effects.
                assert name_of(path).startswith(("store/", "rewrite/")), where


RUNS = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_in_an_input_can_run(path: Path) -> None:
    tree = tree_of(path)
    in_frameworks = name_of(path).startswith("frameworks/")
    for dotted, line in imports(tree):
        top = dotted.split(".")[0]
        assert top not in RUNS, f"{path}:{line} imports {dotted}"
        assert in_frameworks or top not in FRAMEWORKS, f"{path}:{line} imports {dotted}"
    for name, call in calls(tree):
        last = name.rsplit(".", 1)[-1]
        assert name not in ("eval", "exec", "compile", "__import__"), f"{path}:{call.lineno}"
        assert last not in ("system", "popen", "execv"), f"{path}:{call.lineno}: {name}"
        assert name not in ("torch.load", "np.load", "numpy.load"), f"{path}:{call.lineno}"
        allowed = [k.value for k in call.keywords if k.arg == "allow_pickle"]
        assert all(ast.unparse(value) == "False" for value in allowed), f"{path}:{call.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    tree = tree_of(path)
    if tree.body:
        assert ast.get_docstring(tree), path


def test_no_room_is_for_odds_and_ends() -> None:
    names = {part for path in MODULES for part in path.relative_to(PACKAGE).with_suffix("").parts}
    assert not names & {"utils", "util", "helpers", "helper", "common", "misc"}
    assert len(MODULES) > 40
