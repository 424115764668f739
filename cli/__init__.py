"""The command line. `commands/` declares the arguments of each command; the modules beside it do the work."""
