"""Audio codecs, containers, resampling and voice activity detection.

Synchronous and CPU-bound: called from worker threads. In memory, audio is always mono float32 (``pcm.Samples``).
"""
