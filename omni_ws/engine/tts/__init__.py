"""Voices (TTS): engines for ``Task.SPEECH`` only, which turn text into audio.

This module imports nothing, so that the voice worker starts fast.
"""
