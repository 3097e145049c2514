"""`python -m difflm` is the command `difflm`."""

import sys

from difflm.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
