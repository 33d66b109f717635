"""The engine's own numbers for a plan, without its memory: probes, what they told, proposals checked by them."""
