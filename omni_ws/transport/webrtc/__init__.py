"""Calls of the Realtime and Live APIs over WebRTC: events travel over a data channel, speech over Opus tracks."""
