"""Metrics, logs, traces and profiles: what becomes of sessions and requests."""
