"""How torch's threads wait for each other in a process of lychee's own; to be imported before torch.

GNU OpenMP's threads spin for milliseconds where no work comes. On cores that other programs use too, that made decoding
ten times slower than threads that sleep soon; on free cores the difference is within the noise.
"""

import os

NAME = "GOMP_SPINCOUNT"
GIVEN = os.environ.get(NAME)
"""What the user has set, if anything."""
os.environ.setdefault(NAME, "2000")
