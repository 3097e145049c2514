"""The speed of this machine: medians of a few repeats."""
