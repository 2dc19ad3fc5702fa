"""Render the diagrams of docs/architecture.md: docs/diagrams/NAME.mmd becomes docs/images/architecture-NAME.svg.

    python docs/render_diagrams.py            # all whose source changed; needs node and a Chromium
    python docs/render_diagrams.py --check    # only whether the pictures are those of the present sources

The pictures are committed, so that the built site loads no script from elsewhere. A comment in each picture has the
hash of its source. mermaid-cli is run by npx; CHROMIUM names the browser.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

DOCS = Path(__file__).parent
MERMAID_CLI = "@mermaid-js/mermaid-cli@11"
STYLE = {
    "theme": "neutral",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False, "wrappingWidth": 340},
    "fontFamily": "DejaVu Sans, Arial, sans-serif",
    "deterministicIds": True,
}


def list_sources() -> list[Path]:
    """List the sources of the diagrams."""
    return sorted((DOCS / "diagrams").glob("*.mmd"))


def picture_of(source: Path) -> Path:
    """The picture that a source becomes."""
    return DOCS / "images" / f"architecture-{source.stem}.svg"


def is_current(source: Path) -> bool:
    """Whether a picture was rendered from the present source."""
    picture = picture_of(source)
    return picture.is_file() and picture.read_text(encoding="utf-8").endswith(_hash_comment(source))


def render(source: Path) -> None:
    """Render a diagram, and note the hash of its source in it."""
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        style, launch, picture = (Path(folder) / name for name in ("style.json", "launch.json", "picture.svg"))
        style.write_text(json.dumps(STYLE))
        launch.write_text(json.dumps({"executablePath": browser, "args": ["--no-sandbox"]}))
        command = ["npx", "--yes", "-p", MERMAID_CLI, "mmdc", "-q", "-i", source, "-o", picture, "-b", "white"]
        subprocess.run(
            [*command, "-c", style, "-p", launch], check=True, env={**os.environ, "PUPPETEER_SKIP_DOWNLOAD": "1"}
        )
        text = picture.read_text(encoding="utf-8").rstrip("\n") + _hash_comment(source)
    picture_of(source).write_text(text, encoding="utf-8")


def _hash_comment(source: Path) -> str:
    return f"\n<!-- source: sha256 {sha256(source.read_bytes()).hexdigest()} -->\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which pictures are out of date")
    outdated = [source for source in list_sources() if not is_current(source)]
    if parser.parse_args().check:
        sys.exit("\n".join(f"out of date: {source.name}" for source in outdated) or None)
    for source in outdated:
        render(source)
