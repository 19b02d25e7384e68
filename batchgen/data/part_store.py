"""Where one writer commits its answers: parts/ and the commit.log that names them. A run folder is one, and so is the folder
of each worker in it."""

from __future__ import annotations

import os
from pathlib import Path


class PartStore:
    """Places only. `path` need not exist; see `make`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.parts = self.path / "parts"
        self.commit_log = self.path / "commit.log"
