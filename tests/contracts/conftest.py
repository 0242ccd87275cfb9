"""Assertions of contracts that several files share tell what they compared."""

import pytest

pytest.register_assert_rewrite("tests.contracts.engine")
