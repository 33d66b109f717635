"""Translates the JSON of OpenAI's and Anthropic's APIs to engine requests and back, without sockets."""
