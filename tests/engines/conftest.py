"""The engine contract's asserts say what differs, as those of test files do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.engines.contract")
