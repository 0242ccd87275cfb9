"""The docs' reference pages, made of the code: ``python -m tests.reference`` writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.reference.commands import commands_page
from tests.reference.names import names_page
from tests.reference.report import report_page
from tests.reference.settings import settings_page

PAGES: Mapping[str, Callable[[], str]] = {
    "settings": settings_page,
    "report": report_page,
    "commands": commands_page,
    "python": names_page,
}
