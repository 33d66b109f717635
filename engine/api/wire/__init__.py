"""JSON of OpenAI's and Anthropic's interfaces to requests of the engine and back; functions and values, no sockets."""
