"""docs/settings.md is made of the settings."""

from __future__ import annotations

from tests.readme import DOCS
from tests.settings.page import MODELS, settings_page, settings_schema


def test_the_page_of_the_docs_is_made_of_the_settings() -> None:
    assert (DOCS / "settings.md").read_text() == settings_page(), (
        "python -m tests.settings.page > docs/settings.md"
    )


def test_every_setting_has_a_description_and_stands_on_the_page() -> None:
    models, page = settings_schema(), settings_page()
    assert {*models} == {model.__name__ for model in MODELS}
    for model in models.values():
        for name, field in model["properties"].items():
            assert field["description"], name
            assert f"| `{name}` |" in page
