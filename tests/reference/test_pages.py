"""The docs' reference pages are made of the code, and leave nothing out."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.readme import DOCS
from tests.reference import PAGES
from tests.reference.report import REPORTS, fields_of
from tests.reference.settings import MODELS, settings_page, settings_schema


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_made_of_the_code(name: str) -> None:
    page = (DOCS / "reference" / f"{name}.md").read_text()
    assert page == PAGES[name](), "python -m tests.reference writes it"


def test_every_setting_has_a_description_and_stands_on_the_page() -> None:
    models, page = settings_schema(), settings_page()
    assert {*models} == {model.__name__ for model in MODELS}
    for model in models.values():
        for name, field in model["properties"].items():
            assert field["description"], name
            assert f"| `{name}` |" in page


@pytest.mark.parametrize("kind", REPORTS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_report_is_described(kind: type) -> None:
    described = {one for names in fields_of(kind) for one in names.split(", ")}
    inherited = {one.name for base in kind.__mro__[1:] if base in REPORTS for one in fields(base)}
    assert described | inherited == {one.name for one in fields(kind)}
