"""The devices of the window: where they come from, what is free on them, and what people allow of them."""
