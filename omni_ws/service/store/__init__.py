"""The store of sessions: what lets another process go on with a session whose process is gone."""
