"""The tables of docs/performance.md: `python -m benchmarks.speed`."""

import sys

from benchmarks.speed.machine import main

sys.exit(main())
