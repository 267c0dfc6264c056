"""The threads and queues of turn detection, which finds the spoken turns in the audio of an open microphone."""
