"""`python -m redline` is `redline`."""

import sys

from redline.cli.main import main

sys.exit(main())
