"""Reading: a slim checkpoint, or the directory it was made of, as mappings of arrays."""

from slimckpt.views.checkpoint import Checkpoint, Files, Step, open
from slimckpt.views.rank import FileView, RankView
from slimckpt.views.resharded import Resharded, ReshardedRank
from slimckpt.views.whole import WholeTensor

__all__ = [
    "Checkpoint",
    "FileView",
    "Files",
    "RankView",
    "Resharded",
    "ReshardedRank",
    "Step",
    "WholeTensor",
    "open",
]
