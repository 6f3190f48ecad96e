"""The samples, and what their ``expected.json`` says of them."""

import json
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parent / "samples"


def expected(folder: str) -> dict[str, Any]:
    """The truth of a folder, as its framework read it."""
    return json.loads((SAMPLES / folder / "expected.json").read_text())


def all_samples() -> list[Path]:
    """Every file of every sample."""
    return sorted(path for path in SAMPLES.rglob("*") if path.is_file())
