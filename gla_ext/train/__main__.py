"""`python -m gla_ext.train`."""

import sys

from gla_ext.train.command import main

if __name__ == "__main__":
    sys.exit(main())
