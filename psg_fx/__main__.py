"""`python -m psg_fx`: the command line, as `psg-fx`."""

import sys

from psg_fx.cli import main

sys.exit(main())
