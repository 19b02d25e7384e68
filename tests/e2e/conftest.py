from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import WarmServer
from toy import make_toy_model


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy_model(tmp_path_factory.mktemp("model") / "toy", layers=1)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> Iterator[WarmServer]:
    with WarmServer(tmp_path_factory.mktemp("output"), toy) as server:
        yield server


@pytest.fixture
def here(tmp_path: Path, toy: Path) -> Path:
    """An empty folder with the toy model in it, for the job file, its rows and its output."""
    (tmp_path / "toy").symlink_to(toy)
    return tmp_path
