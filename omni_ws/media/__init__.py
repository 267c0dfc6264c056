"""Images and video on their way to the engines. Synchronous; called from worker threads, never from the event loop."""
