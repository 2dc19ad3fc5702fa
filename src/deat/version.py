"""The software that a record was made with."""

import platform

import torch

VERSION = "0.1.0"


def get_versions() -> dict[str, str]:
    """deat, torch and Python."""
    return {"deat": VERSION, "torch": torch.__version__, "python": platform.python_version()}
