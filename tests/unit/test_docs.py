"""The documents: links, anchors, public names, promises and line lengths are what they claim to be."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import deat

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import render_diagrams  # noqa: E402

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


def test_every_file_and_anchor_that_a_page_links_to_exists():
    missing = []
    for page in PAGES:
        for file, anchor in links_of(page):
            target = page.parent / file if file else page
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                missing.append(f"{page_id(page)}: {file}#{anchor}")
    assert missing == []


def test_a_page_of_the_site_links_to_nothing_outside_the_site():
    links = [(page, file) for page in sorted(DOCS.rglob("*.md")) for file, _ in links_of(page) if file]
    outside = [(page_id(page), file) for page, file in links if DOCS not in (page.parent / file).resolve().parents]
    assert outside == []


def test_lines_end_at_100_columns_but_for_tables_and_images():
    pages = [*WRITTEN, *(page for page in RESULTS if page.parent.name != "report")]
    lines = [(page_id(page), line) for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    assert [(page, line) for page, line in lines if len(line) > 100 and not line.startswith(("|", "!["))] == []


def test_every_page_is_in_the_navigation_or_linked_from_the_architecture():
    named = (ROOT / "mkdocs.yml").read_text(encoding="utf-8") + (DOCS / "architecture.md").read_text(encoding="utf-8")
    pages = [str(page.relative_to(DOCS)) for page in WRITTEN if DOCS in page.parents]
    assert [page for page in pages if page not in named] == []


def test_every_python_file_that_a_page_on_the_code_names_exists():
    files = [file.as_posix() for folder in ("src", "tests", "bench", "docs") for file in (ROOT / folder).rglob("*.py")]
    sources = [
        DOCS / "architecture.md",
        ROOT / "CONTRIBUTING.md",
        *DOCS.glob("decisions/*.md"),
        *DOCS.glob("diagrams/*"),
    ]
    named = {(page.name, name) for page in sources for name in re.findall(r"[\w/]+\.py\b", page.read_text("utf-8"))}
    known = {name for _, name in named if any(file.endswith(f"/{name}") for file in files)}
    assert sorted(pair for pair in named if pair[1] not in known | {"my_file.py"}) == []


def test_the_diagrams_are_those_of_their_sources_and_the_site_loads_no_script_for_them():
    assert len(sources := render_diagrams.list_sources()) == 3
    assert [source.name for source in sources if not render_diagrams.is_current(source)] == []
    assert "mermaid" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page_id(page) for page in PAGES if "```mermaid" in page.read_text(encoding="utf-8")] == []


def test_the_api_reference_has_every_public_name():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^::: deat\.(\w+)$", pages, flags=re.MULTILINE)
    assert sorted({*documented} - {"core", "errors"}) == sorted(
        {*deat.__all__} - {"attack_schedules", "core", "errors", "tasks"}
    )


def test_make_test_asks_for_every_package_that_a_test_is_skipped_without():
    wanted = {n for p in (ROOT / "tests").rglob("*.py") for n in re.findall(r'importorskip\(\s*"(\w+)"', p.read_text())}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    asked = re.findall(r'^\t-.* -e "\.\[(\w+)\]"$', makefile, flags=re.MULTILINE)
    wanted = {{"yaml": "pyyaml"}.get(name, name) for name in wanted}
    brought = {re.split(r"\W", text)[0] for extra in ("dev", *asked) for text in extras[extra]}
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert "triton" not in pinned, "a torch for CUDA accepts one version of it alone"
    pinned |= set(re.findall(r" (triton)==", makefile))
    assert {"ray", "triton"} <= wanted <= brought & pinned


def test_the_page_of_gpu_tests_leaves_none_out() -> None:
    shares = (ROOT / "bench" / "gpu_tests.py").read_text(encoding="utf-8")
    files = {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files
    assert {file for file in files if file not in shares} == set()
