"""`python -m creditgraph`."""

import sys

from creditgraph.pipeline.app.cli import main

sys.exit(main())
