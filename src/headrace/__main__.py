"""`python -m headrace`: the command line, where `headrace` itself is on no path."""

import sys

from headrace.cli.main import main

sys.exit(main())
