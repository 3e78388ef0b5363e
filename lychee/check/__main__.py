"""`python -m lychee.check`."""

import sys

from . import main

sys.exit(main())
