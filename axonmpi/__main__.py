"""`python -m axonmpi`, the same as the `axonmpi` command."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
