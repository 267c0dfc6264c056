"""Observers of sessions and requests: metrics, logs, traces and profiles. Read ``observer`` first."""
