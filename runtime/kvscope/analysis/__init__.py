"""What a recording tells: the audit and its assertions, figures, the difference of two runs, and plain data."""
