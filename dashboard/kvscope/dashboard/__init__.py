"""The terminal dashboard and the command line. Never loads torch."""
