"""The vLLM engine: a multimodal Thinker and, optionally, a Talker with a neural codec, each in processes of vLLM.

A request runs through up to three stages (``engine.channel``)::

    decoded input ─▶ Thinker ─ text ─▶ Talker ─ codec frames ─▶ Code2Wav ─▶ audio
                        │
                        └─ text, tool calls, log-probabilities

The Thinker starts on the prompt while the input is still arriving (``early_input``); the Talker speaks the answer
clause by clause; Code2Wav decodes codec frames in chunks whose size adapts to the player (``engine.channel``).
"""
