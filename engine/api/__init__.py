"""The server for other programs: `wire` translates their JSON to requests of the engine and back, `server` is HTTP."""
