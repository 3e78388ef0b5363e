"""`python -m lychee.check`."""

import sys

from lychee.__main__ import main

sys.exit(main(["check", *sys.argv[1:]]))
