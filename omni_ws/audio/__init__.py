"""Audio between the wire and the engines. Synchronous; called from worker threads, never from the event loop."""
