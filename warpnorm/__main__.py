"""`python -m warpnorm`."""

import sys

from warpnorm.cli import main

sys.exit(main())
