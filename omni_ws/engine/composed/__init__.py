"""Composed engines, made of an engine for speech recognition (ASR), one for answers (LLM), and one for speech (TTS)."""
