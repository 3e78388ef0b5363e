"""`python -m lychee.tune`."""

import sys

from . import main

sys.exit(main())
