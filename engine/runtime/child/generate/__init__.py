"""Generation in the child: prompts, slots, decode loop, sampling, saved KV states."""
