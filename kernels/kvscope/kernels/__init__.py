"""Triton kernels for paged attention, each beside the eager reference that is its specification."""
