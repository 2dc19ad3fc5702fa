"""What the documents claim to be tested is tested."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_test_that_a_promise_rests_on_exists(file, name):
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_every_number_of_the_table_stands_once():
    numbers = re.findall(r"^\| (\d+a?) \| .*::", PAGE, flags=re.MULTILINE)
    assert len(numbers) == len(set(numbers)) >= 51


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_every_file_that_a_page_links_to_exists(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
