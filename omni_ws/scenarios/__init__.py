"""Scenarios: callers that speak, type and interrupt, and what their calls are expected to show (docs/testing.md)."""
