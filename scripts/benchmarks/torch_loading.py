"""How long torch takes to load a rank: through slimckpt, and by itself from the original."""

from __future__ import annotations

from pathlib import Path

from benchmarks.reading import MEMMAP, Reading
from benchmarks.turns import Contender, Figures, Result
from benchmarks.workshop import PYTHON, SCRIPTS, Workshop

TENSORS = 32
READER = SCRIPTS / "benchmarks" / "torch_reader.py"
TORCH = SCRIPTS.parent / ".venvs" / "torch" / "bin" / "python"
OURS, THEIRS = "frameworks.torch.load, store", "torch.load(mmap=True), original"


class _Loading(Reading):
    """One turn; the pages that were touched after everything was there apart."""

    def __call__(self) -> Figures:
        found = super().__call__()
        return found | {"s touching": found["s touched"] - found["s views"]}


def torch_loading(workshop: Workshop) -> Result:
    """One rank of 512 MiB in 32 tensors."""
    nbytes = workshop.options.nbytes(512 << 20)
    result = Result(f"load a rank of {nbytes / 2**20:.3g} MiB with torch, seconds after import")
    if not TORCH.exists():
        result.missing["torch"] = f"there is no {TORCH}; scripts/interop torch makes it"
        return result
    source = workshop.many_tensors(TENSORS, nbytes, "torch")
    store = workshop.store(source)
    agreed: dict[str, float] = {}

    def contender(name: str, how: str, path: Path, reader: Path, python: Path) -> Contender:
        turn = _Loading(how, path, path if path.is_dir() else store, agreed, str(python), reader)
        return Contender(name, turn, str(python))

    memmap = f"{MEMMAP}, store"
    contenders = [
        contender(OURS, "load", store, READER, TORCH),
        contender("frameworks.torch.state_dict, store", "state_dict", store, READER, TORCH),
        contender(THEIRS, "own-mmap", source, READER, TORCH),
        contender("torch.load, original", "own", source, READER, TORCH),
        contender(
            memmap, "memmap", workshop.mapped(store), SCRIPTS / "benchmarks" / "reader.py",
            Path(PYTHON),
        ),
    ]  # fmt: skip
    result.take_turns(contenders, workshop.options.runs)
    result.judge_ratio("torch: load of 32 tensors", OURS, 2, THEIRS, "s views")
    result.judge_ratio("torch: every page touched", OURS, 1.15, memmap, "s touching")
    return result
