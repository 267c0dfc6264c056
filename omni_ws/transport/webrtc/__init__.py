"""The Realtime API over WebRTC: events by a data channel, speech by Opus tracks."""
