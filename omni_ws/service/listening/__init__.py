"""Turn detection: finds the spoken turns in the audio of an open microphone. Begin with ``turn_listener``."""
