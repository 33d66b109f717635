"""The HTTP API for other programs: `wire` translates between JSON and engine requests, `server` handles HTTP."""
