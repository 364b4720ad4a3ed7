"""The command line: `jaxaudit COMMAND`, one function for each command."""
