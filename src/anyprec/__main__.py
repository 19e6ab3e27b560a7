"""`python -m anyprec VERB ...`: the same as the `anyprec` command."""

import sys

from anyprec.cli.dispatch import main

sys.exit(main())
