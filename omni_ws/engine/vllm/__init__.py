"""The vLLM engine: a multimodal Thinker and, optionally, a voice.

The Thinker runs in processes of vLLM. The voice is a Talker, also on vLLM, with a neural codec, or an omni model's own
voice (``engine.omni``).

A request runs through up to three stages (``engine.channel``)::

    decoded input ─▶ Thinker ─ text ─▶ Talker ─ codec frames ─▶ Code2Wav ─▶ audio
                        │
                        └─ text, thought, tool calls, log-probabilities

The Thinker starts on the prompt while the input is still arriving (``early_input``); a Talker on vLLM speaks the
answer clause by clause; Code2Wav decodes codec frames in chunks whose size adapts to the player (``engine.channel``).
"""
