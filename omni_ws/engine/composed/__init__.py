"""Compositions: an engine made of engines, one that hears (ASR), one that answers (LLM), and one that speaks (TTS)."""
