"""The Realtime API over WebRTC: events travel over a data channel, speech over Opus tracks."""
