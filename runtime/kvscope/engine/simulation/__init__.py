"""The engine without a model: a trace of requests, a virtual clock, and the real scheduler, tables and pool."""
