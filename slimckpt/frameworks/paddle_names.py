"""What files of Paddle may name: what Paddle 2.6 to 3.3 itself writes, beside numpy's arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from slimckpt.frameworks.allowed import Allowed, Found

_METADATA = ("LocalTensorIndex", "LocalTensorMetadata", "Metadata")
_NAMES = {
    "paddle.base.libpaddle": ("GeneratorState",),
    "paddle.distributed.checkpoint.metadata": _METADATA,  # 2.6 to 3.1
    "paddle.distributed.flex_checkpoint.dcp.metadata": _METADATA,
}


def allowed_of_paddle(allow: Iterable[Any]) -> Allowed:
    """The allow-list of Paddle's files."""
    return Allowed(_NAMES, stand_ins={("builtins", "eval"): Found(_data, True)}, allow=allow)


def _data(expression: Any, names: Any) -> Any:
    """Stands for ``eval``, by which Paddle writes a static tensor; no other use is known to it."""
    if expression != "data" or type(names) is not dict or list(names) != ["data"]:
        raise TypeError("eval is not run, and this is not how Paddle writes a tensor")
    if type(names["data"]) is not np.ndarray:
        raise TypeError("the data of a tensor are no array")
    return names["data"]
