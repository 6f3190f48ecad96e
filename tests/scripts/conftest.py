"""Scripts are not installed; tests import their modules from where they lie."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
