"""`python -m lazyshard_producer`: the same as the command `lazyshard-producer`."""

import sys

from lazyshard_producer.cli import main

if __name__ == "__main__":
    sys.exit(main())
