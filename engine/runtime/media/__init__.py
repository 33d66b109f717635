"""Images and sounds of a conversation, decoded in confined processes."""
