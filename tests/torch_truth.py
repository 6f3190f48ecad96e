"""What torch and Paddle themselves read of the samples, as tensors by exact path."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sample_files import SAMPLES, expected

TORCH = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "complex128": "C128", "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16",
    "int32": "I32", "int64": "I64", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "quint8": "U8", "qint8": "I8",
    "complex32": "opaque:complex32", "float4_e2m1fn_x2": "opaque:float4_e2m1fn_x2",
}  # fmt: skip
FOLDERS = (
    "torch_corners",
    "torch_ddp4",
    "megatron_tp2_pp2",
    "deepspeed_zero1_dp4",
    "deepspeed_zero3_dp4",
    "lora_steps",
)
PADDLE_FOLDERS = tuple(sorted(path.name for path in SAMPLES.glob("paddle*")))


class Known(NamedTuple):
    """A tensor that a framework read; ``sha256`` is of its elements in C order, little-endian."""

    path: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    sha256: str | None


def name_of(path: str) -> str:
    """``['a'][0].b`` as people say it: ``a.0.b``."""
    parts, node = [], ast.parse(f"x{path}", mode="eval").body
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        else:
            assert isinstance(node, ast.Subscript)
            parts.append(str(ast.literal_eval(node.slice)))
        node = node.value
    return ".".join(reversed(parts))


def torch_files(folder: str) -> dict[str, list[Known]]:
    """Tensors of each file of a folder that torch.save wrote."""
    return {
        file: [known for path, entry in about["tensors"].items() for known in _known(path, entry)]
        for file, about in expected(folder)["files"].items()
        if "tensors" in about and not file.endswith(".safetensors")
    }


def _known(path: str, entry: dict[str, Any]) -> Iterator[Known]:
    if "local" in entry:
        yield from _known(path, entry["local"])
        return
    parts = [(key, value) for key, value in entry.items() if isinstance(value, dict)]
    if entry.get("layout", "").startswith("torch.sparse"):
        for key, value in parts:
            yield from _known(f"{path}.{key}", value)
        return
    dtype = TORCH[entry["dtype"].removeprefix("torch.")]
    strides = tuple(entry["stride"]) if "stride" in entry else None
    if entry.get("device") == "meta":
        dtype, strides = "opaque:meta", None
    yield Known(path, name_of(path), dtype, tuple(entry["shape"]), strides, entry.get("sha256"))


def paddle_files(folder: str) -> dict[Path, list[Known]]:
    """Tensors of each pickle of a folder that Paddle wrote."""
    found = {}
    for file, entries in expected(folder)["tensors"].items():
        if file.endswith(".safetensors"):
            continue
        found[SAMPLES / folder / "ckpt" / file] = [_of_paddle(entry) for entry in entries]
    return found


def _of_paddle(entry: dict[str, Any]) -> Known:
    keys = [int(k[1:-1]) if re.fullmatch(r"\[\d+\]", k) else k for k in entry["path"]]
    dtype = TORCH[entry["dtype"]]
    path = "".join(f"[{key!r}]" for key in keys)
    name = ".".join(map(str, keys))
    return Known(path, name, dtype, tuple(entry["shape"]), None, entry.get("sha256"))
