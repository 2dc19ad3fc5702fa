"""Makes printing possible in any environment."""

import io
import os
import sys


def prepare_standard_streams() -> None:
    """Make printing possible in any environment.

    For a stream that is closed, what is printed goes nowhere, and no file that is opened later takes its number, where
    other libraries' output would end up in it. For characters that the terminal's encoding lacks, `?` is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
