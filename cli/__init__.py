"""The command line: a module for each command, with its arguments and its work."""
