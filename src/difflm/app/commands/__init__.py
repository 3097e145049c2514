"""The subcommands of `difflm`; related ones share a file."""
