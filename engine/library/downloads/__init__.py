"""Getting files of models: transfers in a child that resume where they were, and the queue of them."""
