"""`python -m deat`."""

import sys

from deat.cli.main import main

sys.exit(main())
