"""Decoding and description of images and video. Synchronous and CPU-bound: called from worker threads."""
