"""`python -m deat`."""

import sys

from deat.cli.main import run_process

sys.exit(run_process())
