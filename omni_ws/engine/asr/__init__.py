"""Engines for speech recognition (ASR): ``Task.TRANSCRIBE`` only.

``RecogniserEngine`` cuts audio into utterances and deals with the requests; a ``Recogniser`` writes utterances down.
"""
