"""The command, the studio, plots and benchmarks of this machine."""
