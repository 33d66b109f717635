"""Translates between the JSON of OpenAI's and Anthropic's APIs and engine requests, without sockets."""
