"""Tests that mount are skipped, with the reason, where FUSE is not to be had."""

from pathlib import Path

import pytest
from mounts import skip_without_fuse


@pytest.fixture
def point(tmp_path: Path) -> Path:
    """An empty directory to mount on."""
    skip_without_fuse()
    path = tmp_path / "mount point"
    path.mkdir()
    return path
