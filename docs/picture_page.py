"""Takes a picture of a report's page, in light or dark, as a screen or a phone shows it.

python docs/picture_page.py runs/report/index.html docs/images/report.png [dark] [390]
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.browser import browser


def take(page: Path, picture: Path, scheme: str = "light", width: int = 1120, height: int = 860) -> None:
    """One picture of the top of the page."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as window:
        window.size(width, height)
        window.colours(scheme)
        window.open(page)
        window.picture(picture)


if __name__ == "__main__":
    rest = sys.argv[3:]
    wide = next((int(word) for word in rest if word.isdigit()), 1120)
    take(Path(sys.argv[1]), Path(sys.argv[2]), "dark" if "dark" in rest else "light", wide)
