"""The verbs of the command, one file for those that belong together."""
