"""Which deat made a number: its version alone is that of many commits.

    python bench/gpu_source.py

says it of the files that are here, with or without git, so that those of an old number can be found again.
"""

import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import deat

PACKAGE = Path(deat.__file__).parent


def made_by(package: Path = PACKAGE) -> dict[str, str | None]:
    """The commit that changed deat last, where git knows, and a digest of its own files, which is there anywhere."""
    return {"commit": commit(package), "source": digest(package)}


def digest(package: Path) -> str:
    """The same for the same Python files, wherever they lie."""
    found = sha256()
    for file in sorted(package.rglob("*.py")):
        text = file.read_bytes()
        found.update(f"{file.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return found.hexdigest()[:12]


def commit(package: Path) -> str | None:
    """The last commit that changed them, with a plus where they are not as it left them; None without git."""
    found = _git(package, "log", "-1", "--format=%h", "--", ".")
    return f"{found}{'+' * bool(_git(package, 'status', '--porcelain', '--', '.'))}" if found else None


def _git(folder: Path, *words: str) -> str:
    try:
        asked = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # there is none
        return ""
    return "" if asked.returncode else asked.stdout.strip()


def told(made: dict[str, Any] | None) -> str:
    """What a page says of it; of a number from before this was noted, too."""
    if made is None:
        return "commit not noted"
    return f"{made['commit']}, sources {made['source']}" if made["commit"] else f"sources {made['source']}"


if __name__ == "__main__":
    print(told(made_by()))
