"""How fast this machine trains and writes, beside rivals: medians of a few repeats."""
