"""`python -m gla_ext.train.prepare`."""

import sys

from gla_ext.train.prepare.command import main

if __name__ == "__main__":
    sys.exit(main())
