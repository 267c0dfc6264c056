"""Voices (TTS): engines for ``Task.SPEECH`` only, from text to audio.

Imports nothing, so that the process of the voice starts fast.
"""
