"""Answers: prompts, slots, sampling, the decode loop, saved KV state."""
