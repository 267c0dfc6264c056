"""Engines, and the modules that they share.

``base`` is the contract between server and engines. ``channel`` connects the stages of an engine, ``decoding`` decodes
its input, ``clauses`` splits its text for synthesis. The engines in ``asr``, ``llm`` and ``tts`` do one task each, and
``composed`` combines them into one; ``remote`` and ``vllm`` are complete engines.
"""
