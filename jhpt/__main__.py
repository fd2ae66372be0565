"""`python -m jhpt`."""

import sys

from jhpt.cli import main

sys.exit(main())
