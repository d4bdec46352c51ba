"""``python -m ops``."""

import sys

from ops import cli

sys.exit(cli.main())
