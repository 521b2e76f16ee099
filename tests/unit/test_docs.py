"""Links of the documentation lead somewhere."""

import re
from pathlib import Path

import pytest

import glmv

ROOT = Path(glmv.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_reached_from_the_readme():
    linked = re.findall(r"\]\((docs/[^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert {str(page.relative_to(ROOT)) for page in PAGES if "docs" in page.parts} <= set(linked)
