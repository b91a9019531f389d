"""`python -m psg_fx.cli`."""

import sys

from psg_fx.cli import main

sys.exit(main())
