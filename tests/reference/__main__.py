"""Write the reference pages of the docs: ``python -m tests.reference``."""

from __future__ import annotations

from tests.readme import DOCS
from tests.reference import PAGES

for name, page in PAGES.items():
    (DOCS / "reference" / f"{name}.md").write_text(page())
