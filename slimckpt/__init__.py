"""slimckpt: find what the rank files of a training run have in common, store it once, and read
every rank of every step lazily.

>>> import slimckpt
>>> slimckpt.slim("run", "run.slim")
>>> with slimckpt.open("run.slim") as ckpt:
...     view = ckpt.rank(3)
...     view["backbone.embedding.weight"]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slimckpt.errors import SlimckptError

if TYPE_CHECKING:
    from slimckpt.analysis.analyze import analyze
    from slimckpt.analysis.report import Report
    from slimckpt.convert.export import ExportResult, export
    from slimckpt.convert.extract import ExtractResult, extract
    from slimckpt.convert.merge import MergeResult, merge
    from slimckpt.convert.reshard import ReshardResult, reshard
    from slimckpt.layouts.slicing import slice_by_tuple, slice_of
    from slimckpt.model import Tensor
    from slimckpt.rewrite.restore import RestoreResult, restore
    from slimckpt.rewrite.slim import SlimResult, slim
    from slimckpt.rewrite.verify import VerifyResult, verify
    from slimckpt.views import (
        Checkpoint,
        FileView,
        RankView,
        Resharded,
        ReshardedRank,
        Step,
        WholeTensor,
        open,
    )

# Imported on first use: a job that only reads a rank does not pay for libhdf5.
_HOMES = {
    "analyze": "slimckpt.analysis.analyze",
    "Report": "slimckpt.analysis.report",
    "slice_by_tuple": "slimckpt.layouts.slicing",
    "slice_of": "slimckpt.layouts.slicing",
    "Tensor": "slimckpt.model",
    "extract": "slimckpt.convert.extract",
    "ExtractResult": "slimckpt.convert.extract",
    "reshard": "slimckpt.convert.reshard",
    "ReshardResult": "slimckpt.convert.reshard",
    "merge": "slimckpt.convert.merge",
    "MergeResult": "slimckpt.convert.merge",
    "export": "slimckpt.convert.export",
    "ExportResult": "slimckpt.convert.export",
    "restore": "slimckpt.rewrite.restore",
    "RestoreResult": "slimckpt.rewrite.restore",
    "slim": "slimckpt.rewrite.slim",
    "SlimResult": "slimckpt.rewrite.slim",
    "verify": "slimckpt.rewrite.verify",
    "VerifyResult": "slimckpt.rewrite.verify",
    "Checkpoint": "slimckpt.views",
    "FileView": "slimckpt.views",
    "RankView": "slimckpt.views",
    "Resharded": "slimckpt.views",
    "ReshardedRank": "slimckpt.views",
    "Step": "slimckpt.views",
    "WholeTensor": "slimckpt.views",
    "open": "slimckpt.views",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slimckpt' has no attribute {name!r}")
    found = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found


__all__ = [
    "Checkpoint",
    "ExportResult",
    "ExtractResult",
    "FileView",
    "MergeResult",
    "RankView",
    "Report",
    "ReshardResult",
    "Resharded",
    "ReshardedRank",
    "RestoreResult",
    "SlimResult",
    "SlimckptError",
    "Step",
    "Tensor",
    "VerifyResult",
    "WholeTensor",
    "analyze",
    "export",
    "extract",
    "merge",
    "open",
    "reshard",
    "restore",
    "slice_by_tuple",
    "slice_of",
    "slim",
    "verify",
]
