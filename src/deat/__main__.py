"""`python -m deat`."""

import sys

from deat.cli import main

sys.exit(main())
