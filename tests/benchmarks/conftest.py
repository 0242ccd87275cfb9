from __future__ import annotations

from tests.cli.conftest import bench, one_thread  # noqa: F401 - fixtures
