"""The demo of `make demo`: train on digits, evaluate and report, as the three commands do, in one process.

python examples/demo.py [FOLDER]
"""

import sys

from deat.cli.main import main


def run_demo(folder: str) -> int:
    """Run the commands up to the first that fails, and return its exit status.

    Args:
        folder: The run's folder; a run that is there is overwritten.
    """
    for command in (["train", "--out", folder, "--overwrite"], ["evaluate", folder], ["report", folder]):
        print("\n$ deat", *command, flush=True)
        if status := main(command):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(run_demo(*sys.argv[1:2] or ["runs/demo"]))
