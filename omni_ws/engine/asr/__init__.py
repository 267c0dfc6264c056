"""Engines for speech recognition (ASR): ``Task.TRANSCRIBE`` only.

``RecogniserEngine`` handles requests and cuts their audio into utterances; a ``Recogniser`` transcribes utterances.
"""
