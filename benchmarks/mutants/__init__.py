"""Mutation testing of the core, the service and the native transport: ``python -m benchmarks.mutants --help``."""
