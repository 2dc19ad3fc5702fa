"""Which version of deat's code made a number: a commit, and a digest of the source files.

    python bench/gpu_source.py

prints both for this checkout, so that the code of an old number can be identified. The digest works without git.
"""

import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import deat

PACKAGE = Path(deat.__file__).parent


def made_by(package: Path = PACKAGE) -> dict[str, str | None]:
    """Return the last commit that changed deat (None without git), and a digest of its source files."""
    return {"commit": commit(package), "source": digest(package)}


def digest(package: Path) -> str:
    """Return a digest of the package's Python files; it does not depend on the folder."""
    hashed = sha256()
    for file in sorted(package.rglob("*.py")):
        text = file.read_bytes()
        hashed.update(f"{file.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return hashed.hexdigest()[:12]


def commit(package: Path) -> str | None:
    """Return the last commit that changed the package, with a plus if files differ from it; None without git."""
    last = _git(package, "log", "-1", "--format=%h", "--", ".")
    return f"{last}{'+' * bool(_git(package, 'status', '--porcelain', '--', '.'))}" if last else None


def _git(folder: Path, *words: str) -> str:
    try:
        result = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return ""
    return "" if result.returncode else result.stdout.strip()


def describe_source(made: dict[str, Any] | None) -> str:
    """Return the text of a page; results from before this was recorded have None."""
    if made is None:
        return "commit not recorded"
    digest = f"source digest {made['source']}"
    return f"commit {made['commit']}, {digest}" if made["commit"] else digest


if __name__ == "__main__":
    print(describe_source(made_by()))
