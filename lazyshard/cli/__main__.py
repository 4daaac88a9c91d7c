"""`python -m lazyshard.cli`: the same as the command `lazyshard`."""

import sys

from lazyshard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
