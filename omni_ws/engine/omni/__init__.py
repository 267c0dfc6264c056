"""Speech of the Qwen omni models: Talkers (text to codec frames) and vocoders (codec frames to samples), on torch.

Talker and vocoder run in a process each.
"""
