"""Baselines for omni_ws: the same task, done in usual ways. Each runs in its own process."""
