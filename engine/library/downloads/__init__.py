"""Downloads of models: resumable transfers in a child process, and their queue."""
