"""Engines and what they share.

``base`` is the contract of an engine. ``channel`` connects its stages, ``decoding`` converts its input, ``clauses``
splits its text for synthesis. The engines in ``asr``, ``llm`` and ``tts`` do one task each, ``composed`` makes one
engine of them; ``remote`` and ``vllm`` are complete.
"""
