"""The command ``omni-ws talk``: a conversation at a terminal, by microphone and loudspeaker, files, or text."""
