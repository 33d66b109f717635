"""The HTTP API for other programs: `wire` translates JSON to engine requests and back, `server` handles HTTP."""
