"""The documents: links, anchors, public names, promises and line lengths are what they claim to be."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

import deat

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WRITTEN = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(page for page in DOCS.rglob("*.md") if not {"results", "tutorials"} & set(page.parts)),
]
"""Pages written by hand; those under docs/results and docs/tutorials are made by commands."""
RESULTS = sorted((DOCS / "results").rglob("*.md"))
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
PAGES = [*WRITTEN, *RESULTS, *TUTORIALS]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def promises_of(function: ast.FunctionDef) -> list[str]:
    """The numbers in a test's `@pytest.mark.promise("P1", ...)`."""
    marks = [mark for mark in function.decorator_list if isinstance(mark, ast.Call)]
    return [
        str(ast.literal_eval(argument))
        for mark in marks
        if ast.unparse(mark.func) == "pytest.mark.promise"
        for argument in mark.args
    ]


def promises_with_tests() -> set[str]:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("test_*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {number for function in functions if function.name.startswith("test_") for number in promises_of(function)}


def test_every_promise_is_numbered_once_and_has_a_test():
    numbers = re.findall(r"^\| (P\d+) \|", (DOCS / "reliability.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(numbers) == len(set(numbers)) >= 62
    assert set(numbers) == promises_with_tests()


def links_of(page: Path) -> list[tuple[str, str]]:
    """File and anchor of each link to a file, or to a place of the page itself."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", text)


def anchors_of(page: Path) -> set[str]:
    """The places in a page that a link can lead to: its headings, as GitHub names them, and its ids."""
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'id="(.+?)"', text))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_file_and_anchor_that_a_page_links_to_exists(page):
    missing = []
    for file, anchor in links_of(page):
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            missing.append(f"{file}#{anchor}")
    assert missing == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=page_id)
def test_a_page_of_the_site_links_to_nothing_outside_the_site(page):
    assert [file for file, _ in links_of(page) if file and DOCS not in (page.parent / file).resolve().parents] == []


@pytest.mark.parametrize("page", [*WRITTEN, *(p for p in RESULTS if p.parent.name != "report")], ids=page_id)
def test_lines_end_at_100_columns_but_for_tables_and_images(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 100 and not line.startswith(("|", "!["))] == []


def test_every_page_is_in_the_navigation_or_linked_from_the_architecture():
    named = (ROOT / "mkdocs.yml").read_text(encoding="utf-8") + (DOCS / "architecture.md").read_text(encoding="utf-8")
    pages = [str(page.relative_to(DOCS)) for page in WRITTEN if DOCS in page.parents]
    assert [page for page in pages if page not in named] == []


@pytest.mark.parametrize(
    "page",
    [DOCS / "architecture.md", ROOT / "CONTRIBUTING.md", *sorted((DOCS / "decisions").glob("*.md"))],
    ids=page_id,
)
def test_every_python_file_that_a_page_on_the_code_names_exists(page):
    files = [file.as_posix() for folder in ("src", "tests", "bench", "docs") for file in (ROOT / folder).rglob("*.py")]
    named = re.findall(r"[\w/]+\.py\b", page.read_text(encoding="utf-8"))
    assert [name for name in named if name != "my_file.py" and not any(f.endswith(f"/{name}") for f in files)] == []


def test_the_api_reference_has_every_public_name():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^::: deat\.(\w+)$", pages, flags=re.MULTILINE)
    assert sorted({*documented} - {"core", "errors"}) == sorted(
        {*deat.__all__} - {"core", "errors", "schedules", "tasks"}
    )


def test_make_test_asks_for_every_package_that_a_test_is_skipped_without():
    wanted = {n for p in (ROOT / "tests").rglob("*.py") for n in re.findall(r'importorskip\(\s*"(\w+)"', p.read_text())}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r'^\t-.* -e "\.\[(\w+)\]"$', (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    wanted = {{"yaml": "pyyaml"}.get(name, name) for name in wanted}
    brought = {re.split(r"\W", text)[0] for extra in ("dev", *asked) for text in extras[extra]}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {"ray", "triton"} <= wanted <= brought & pinned


def test_the_page_of_gpu_tests_leaves_none_out() -> None:
    shares = (ROOT / "bench" / "gpu_tests.py").read_text(encoding="utf-8")
    files = {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files
    assert {file for file in files if file not in shares} == set()
