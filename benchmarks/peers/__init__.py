"""What omni_ws is measured against: the same job, done the usual ways. Each runs in a process of its own."""
