"""The version of deat, and the versions that records contain."""

import platform

VERSION = "0.1.0"


def get_versions() -> dict[str, str]:
    """Return the versions of deat, torch and Python."""
    import torch  # takes a second, and importing deat reads this file

    return {"deat": VERSION, "torch": torch.__version__, "python": platform.python_version()}
